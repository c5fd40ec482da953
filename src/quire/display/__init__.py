"""How schemas, documents, arrays and batches look in a terminal and in a notebook."""

from quire.display._html import render_html, render_rows_html
from quire.display._progress import tracked
from quire.display._rich import document_tree, facts_table, print_document, print_facts, print_schema
from quire.display._text import nested_rows, short_value

__all__ = [
    "document_tree",
    "facts_table",
    "nested_rows",
    "print_document",
    "print_facts",
    "print_schema",
    "render_html",
    "render_rows_html",
    "short_value",
    "tracked",
]
