"""No file of the package imports itself through other files, not even inside a function."""

import grimp
import networkx


def test_files_import_each_other_in_one_direction() -> None:
    graph = grimp.build_graph("pyg_dynbatch", exclude_type_checking_imports=True, cache_dir=None)
    imports = networkx.DiGraph(
        (name, other)
        for name in graph.modules
        for other in graph.find_modules_directly_imported_by(name)
    )
    assert imports.has_edge("pyg_dynbatch.nn.weave", "pyg_dynbatch.nn.pairs")
    groups = networkx.strongly_connected_components(imports)
    assert [sorted(group) for group in groups if len(group) > 1] == []
