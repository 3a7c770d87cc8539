"""The loader child: loads one model shard through vLLM, packs it into segments, proves it and hands
it over.
"""
