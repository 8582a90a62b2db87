"""MkDocs hooks for pages outside docs/, and for links to files outside docs/.

The files in PAGES become pages of the site. A link to another file of the repository leads to a
copy of that file in the site. A link to a folder is replaced by its text.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?=[)#])")


def _place(page: File) -> str:
    """Return the path that the source of a page has in the repository."""
    elsewhere = {made: source for source, made in PAGES.items()}
    return elsewhere.get(page.src_uri, f"docs/{page.src_uri}")


def _in_site(path: str) -> str:
    """Return the path that a file of the repository has in the site."""
    return PAGES.get(path, path.removeprefix("docs/"))


def _targets(page: File) -> dict[str, str]:
    """Return the links of a page, as link -> path of its target in the repository."""
    folder = posixpath.dirname(_place(page))
    links = LINK.findall(page.content_string)
    return {link: posixpath.normpath(posixpath.join(folder, link)) for link in links}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/ and the linked files to the site's files, and return them."""
    for source, made in PAGES.items():
        files.append(File.generated(config, made, abs_src_path=str(ROOT / source)))
    for page in list(files.documentation_pages()):
        for path in _targets(page).values():
            if (ROOT / path).is_file() and files.get_file_from_path(_in_site(path)) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with its links rewritten for the site."""
    targets = _targets(page.file)
    folder = posixpath.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        return posixpath.relpath(_in_site(targets[link[1]]), folder or ".")

    for link, path in targets.items():
        if (ROOT / path).is_dir():
            markdown = re.sub(rf"\[([^]]*)\]\({re.escape(link)}\)", r"\1", markdown)
    return LINK.sub(lambda link: moved(link) if link[1] in targets else link[1], markdown)
