"""report.html: one self-contained page about a run, or a comparison of several.

``page.write_report`` is the entry point. The package reads run folders, as the ``diagnosis``
package does, so it can also report on a run that was killed or is still training. It must not
import the trainer.
"""
