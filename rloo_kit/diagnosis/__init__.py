"""What a run's record says: read it back, apply rules, watch a run, check the machine.

Reads files; never touches the trainer.
"""
