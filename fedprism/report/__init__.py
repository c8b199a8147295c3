"""Reports: from records to tables, figures and one self-contained page. Never touches a model."""

from fedprism.report.table import Table, table

__all__ = ["Table", "table"]
