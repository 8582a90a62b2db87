"""Trained models for use elsewhere: adapter, merged weights, GGUF, model card, chat, serve.

Reads finished runs; never trains.
"""
