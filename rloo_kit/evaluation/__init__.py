"""Evaluation on held-out prompts: pass@k, intervals, tables, win rates.

Never trains.
"""
