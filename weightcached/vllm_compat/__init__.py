"""The only package that imports or patches vLLM, beside the plug-in itself."""
