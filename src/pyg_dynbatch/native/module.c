/* The extension module pyg_dynbatch._native: the functions of all other files.

   A file with functions for Python ends with a table of them, which is listed here. A file with a
   type has a function like `fill` instead. */

#include "arguments.h"

extern PyMethodDef fuse_functions[], levels_functions[], pairs_functions[], recorder_functions[],
    recordings_functions[], steps_functions[], structure_functions[], subnormals_functions[];
int add_recorder_types(PyObject *module);
#ifndef NO_KERNELS
extern PyMethodDef tree_lstm_functions[];
void choose_best_kernels(void);
#endif

static PyMethodDef *const tables[] = {
    fuse_functions,       levels_functions, pairs_functions,     recorder_functions,
    recordings_functions, steps_functions,  structure_functions, subnormals_functions,
#ifndef NO_KERNELS
    tree_lstm_functions,
#endif
};

/* As PARALLEL_FOR of kernels.c. */
#if defined(_OPENMP) && (!defined(__clang__) || defined(__APPLE__))
#define USES_OPENMP 1
#else
#define USES_OPENMP 0
#endif

static int fill(PyObject *module)
{
#ifndef NO_KERNELS
    choose_best_kernels();
#endif
    /* So that a checkout notices an extension that was built from other sources. */
    if (PyModule_AddStringConstant(module, "SOURCES", SOURCES) ||
        PyModule_AddIntConstant(module, "OPENMP", USES_OPENMP))
        return -1;
    for (int each = 0; each < COUNT(tables); each++)
        if (PyModule_AddFunctions(module, tables[each]))
            return -1;
    return add_recorder_types(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "pyg_dynbatch._native",
    .m_doc = "Schedulers and kernels in C; pyg_dynbatch.core.native loads it.",
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
