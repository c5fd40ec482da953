"""How schemas, documents, arrays and batches look in a terminal and in a notebook."""

from quire.display._html import GALLERY, render_html, render_rows_html
from quire.display._pictures import as_picture, sound, thumbnail
from quire.display._progress import tracked
from quire.display._rich import document_tree, print_document, print_rich, print_schema, schema_tree
from quire.display._rows import facts_table, print_facts, rows_table
from quire.display._text import nested_rows, one_line, short_value

__all__ = [
    "GALLERY",
    "as_picture",
    "document_tree",
    "facts_table",
    "nested_rows",
    "one_line",
    "print_document",
    "print_facts",
    "print_rich",
    "print_schema",
    "render_html",
    "render_rows_html",
    "rows_table",
    "schema_tree",
    "short_value",
    "sound",
    "thumbnail",
    "tracked",
]
