"""report.html: one self-contained page about a run, or a comparison of several.

``page.write_report`` is the entry. The package reads run folders like the ``diagnosis`` package, so
it can report a run that was killed or still trains. It must not know the trainer.
"""
