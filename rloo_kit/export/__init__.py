"""A trained model for use elsewhere: export, model card, chat, serve.

``exporter.export_model`` writes an adapter, merged weights, a GGUF file or a hub repository and
checks that what it wrote answers as before; ``chat.chat`` talks to a model, ``serve.serve`` starts
vLLM's server. Reads finished runs and knows nothing of training.
"""
