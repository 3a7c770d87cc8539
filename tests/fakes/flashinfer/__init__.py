"""As much of FlashInfer as vLLM's autotuning asks for; put this directory's parent on the path of a
process.

Which kernel would be best is not measured: the tuner writes down how often it was asked to.
"""
