/* The extension module pyg_dynbatch._native: the functions of all other files.

   A file with functions for Python ends with a table of them, which is listed here. A file with a
   type has a function like `fill` instead. */

#include "arguments.h"

extern PyMethodDef levels_functions[];

static PyMethodDef *const tables[] = {levels_functions};

static int fill(PyObject *module)
{
    for (int each = 0; each < COUNT(tables); each++)
        if (PyModule_AddFunctions(module, tables[each]))
            return -1;
    return 0;
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
