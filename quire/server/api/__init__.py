"""HTTP dialects, one package each: routes, request bodies and responses."""
