"""Everything that depends on this machine and this process.

``environment.setup`` sets environment variables and imports the libraries in the right order.
``hardware`` detects the device. ``cleanup.release`` and ``cleanup.session`` free memory. This
package must not import the packages for runs, prompts or rewards.
"""
