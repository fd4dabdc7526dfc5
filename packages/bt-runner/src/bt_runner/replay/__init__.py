"""Real traffic through scheduler, pools, tables and builders, without a model's arithmetic."""
