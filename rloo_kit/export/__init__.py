"""Use of a trained model elsewhere: export, model card, chat, serve, hand-over to verl.

``exporter.export_model`` writes an adapter, merged weights, a GGUF file or a hub repository, and
checks that the export answers as before. ``chat.chat`` talks to a model, ``serve.serve`` starts
vLLM's server. The package reads finished runs and knows nothing of training.
"""
