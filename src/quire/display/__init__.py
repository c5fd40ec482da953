"""How schemas, documents, arrays and batches are shown in a terminal and in a notebook."""

from quire.display._html import (
    GALLERY,
    as_picture,
    render_audio,
    render_facts_html,
    render_html,
    render_rows_html,
    render_thumbnail,
)
from quire.display._progress import is_shown, track
from quire.display._rich import (
    document_tree,
    facts_table,
    print_document,
    print_facts,
    print_rich,
    print_schema,
    rows_table,
    schema_tree,
)
from quire.display._text import format_bytes, nested_rows, one_line, short_value

__all__ = [
    "GALLERY",
    "as_picture",
    "document_tree",
    "facts_table",
    "format_bytes",
    "is_shown",
    "nested_rows",
    "one_line",
    "print_document",
    "print_facts",
    "print_rich",
    "print_schema",
    "render_audio",
    "render_facts_html",
    "render_html",
    "render_rows_html",
    "render_thumbnail",
    "rows_table",
    "schema_tree",
    "short_value",
    "track",
]
