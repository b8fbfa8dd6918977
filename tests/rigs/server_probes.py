"""Observations of a running server: its metrics page and its routes."""

from prometheus_client.parser import text_string_to_metric_families


class Page:
    def __init__(self, text):
        self.families = {family.name: family for family in text_string_to_metric_families(text)}

    def value(self, name, **labels):
        """The sum of all samples of this name with these labels."""
        samples = [sample for family in self.families.values() for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def routes(app):
    """(method, path) of all routes of the app, also of nested routers."""

    def each(routes):
        for route in routes:
            inner = getattr(route, "original_router", None)
            if inner is not None:
                yield from each(inner.routes)
            else:
                yield from ((method, route.path) for method in route.methods)

    return sorted(set(each(app.routes)))
