"""Tool ``search``, which finds texts in a local file by the words of a query (BM25)."""

from collections.abc import Callable
from pathlib import Path

from rloo_kit.data.files import read_rows
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.text.wording import format_value


def search(file: str | Path, results: int = 3) -> Callable[[str], str]:
    """Return a tool that searches the texts of a file.

    The package ``bm25s`` ranks the texts with BM25 (Lucene's variant, k1 = 1.5, b = 0.75). Case and
    English stop words are ignored.

    Args:
        file: A .jsonl, .csv or .parquet file with a column ``text``.
        results: Maximum number of texts that the tool returns, at least 1.

    Raises:
        ConfigError: The package ``bm25s`` is missing, or ``results`` is not a positive integer.
        DataError: The file cannot be read, a row has no text, or the texts have no words.
    """
    if not isinstance(results, int) or results < 1:
        raise ConfigError(
            f"search: results is {format_value(results)}; give a whole number of at least 1"
        )
    try:
        import bm25s
    except ImportError as exc:
        raise ConfigError("the tool search needs the package bm25s: pip install bm25s") from exc
    texts = []
    for place, row in read_rows(Path(file)):
        text = row.get("text")
        if not isinstance(text, str) or not text.strip():
            raise DataError(
                f"{place}: the column 'text' must be a non-empty string, because search reads it"
            )
        texts.append(text)
    words_of = bm25s.tokenize(texts, return_ids=False, show_progress=False)
    if not any(words_of):
        raise DataError(f"{format_value(str(file))} has no words, so there is nothing to search")
    index = bm25s.BM25()
    index.index(words_of, show_progress=False)

    def search(query: str) -> str:
        """Search a collection of texts.

        Args:
            query: Words to look for in the texts.
        """
        words = bm25s.tokenize(query, return_ids=False, show_progress=False)
        places, scores = index.retrieve(words, k=min(results, len(texts)), show_progress=False)
        hits = [texts[place] for place, score in zip(places[0], scores[0], strict=True) if score]
        return "\n\n".join(hits) or "Nothing was found: try other words."

    return search
