"""Report on recorded requests: tables, pages, traces and explanations."""
