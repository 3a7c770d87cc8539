"""The loader child: loads one model shard through vLLM, packs it, proves it and hands it over."""
