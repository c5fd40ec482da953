"""Importing datasets of other formats: Petastorm, MDS, WebDataset, Hugging Face, Lance, Delta Lake and Iceberg.

No code in the data is ever run.
"""

from quire.storage.importers._import import IMPORTERS, ImportFormat, import_dataset
from quire.storage.importers._petastorm import SCHEMA_KEY as PETASTORM_SCHEMA_KEY
from quire.storage.importers._source import Images, ImportOptions

__all__ = ["IMPORTERS", "PETASTORM_SCHEMA_KEY", "Images", "ImportFormat", "ImportOptions", "import_dataset"]
