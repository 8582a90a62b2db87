"""report.html: one self-contained page about a run, or a comparison of several.

``page.write_report`` is the entry point. The package reads run folders, as the ``diagnosis``
package does, so it can also report a run that was killed or still trains. It must not import the
trainer.
"""
