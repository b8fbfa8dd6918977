"""How a chat template is compiled: Jinja's code generator, with what passes by the environment led through it."""

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser


class MeteredCode(CodeGenerator):
    """The environment has to offer `counted` (items of loops), `measured` (literals) and `joined` (`~`)."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        """A loop draws its items from `counted`."""
        counted = nodes.EnvironmentAttribute("counted", lineno=node.lineno)
        node.iter = nodes.Call(counted, [node.iter], [], None, None, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`a ~ b`."""
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        """`[a, b]`."""
        self.write("environment.measured(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        """`(a, b)`, unless it is a target of assignment."""
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.measured(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        """`{a: b}`."""
        self.write("environment.measured(")
        super().visit_Dict(node, frame)
        self.write(")")


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant said, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
