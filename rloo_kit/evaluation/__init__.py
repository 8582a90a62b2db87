"""Evaluation on held-out prompts: scores, pass@k, confidence intervals, tables, win rates.

Public: ``rk.evaluate`` and ``Evaluation`` (evaluator), ``rk.evaluate_models`` (table),
``rk.judge_models`` (win_rate). The module ``trained`` finds and loads models; export and chat also
use it. The package never trains and does not know the trainer.
"""
