"""List the packages; rewards, examples and requirements stand beside rloo_kit in the repository."""

from setuptools import find_packages, setup

BESIDE = ("rewards", "examples", "requirements")

setup(
    packages=find_packages(include=["rloo_kit*"]) + [f"rloo_kit.{name}" for name in BESIDE],
    package_dir={"rloo_kit": "rloo_kit"} | {f"rloo_kit.{name}": name for name in BESIDE},
)
