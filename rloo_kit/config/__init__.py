"""The run file and its settings, checked without torch or TRL.

``settings`` is the one table of trainer settings, ``run_file`` reads YAML and ``--set``,
``trainer_settings`` knows TRL's names, older names and the batch, and ``engine_tables`` the tables
``unsloth:`` and ``vllm:``. The package must not know models, data or training.
"""
