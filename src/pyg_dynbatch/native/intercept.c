/* What lets models be recorded: the recorder that is active on a thread, and `__call__` of modules
   and `isinstance` while one is. Also the types of all files of the recorder.

   A module inside the model is asked first whether its call can be recorded; if it cannot, such as
   that of a module that takes Python objects, what its class had as `__call__` is called. */

#include "recorder.h"

struct known known;
PyObject *recorder_type, *lookup_type, *snapshot_type, *function_type;
_Thread_local PyObject *active;

static const struct field fields_of_known[] = {
    FIELD(known, lazy),         FIELD(known, tensor),
    FIELD(known, parameter),    FIELD(known, size),
    FIELD(known, constants),    FIELD(known, module),
    FIELD(known, like),         FIELD(known, metadata),
    FIELD(known, grad_enabled), FIELD(known, autocast_enabled),
    FIELD(known, call_module),  FIELD(known, no_session),
    FIELD(known, answer),       FIELD(known, operators),
    FIELD(known, zero),         FIELD(known, is_wrapped),
};

static PyObject *setup(PyObject *module, PyObject *args, PyObject *kwargs)
{
    for (int each = 0; each < COUNT(fields_of_known); each++) {
        PyObject **const place = (PyObject **)((char *)&known + fields_of_known[each].place);
        PyObject *object = PyDict_GetItemString(kwargs, fields_of_known[each].name);
        if (!object)
            return PyErr_Format(PyExc_TypeError, "%s is missing", fields_of_known[each].name);
        set_reference(place, Py_NewRef(object));
    }
    Py_RETURN_NONE;
}

static PyObject *activate(PyObject *module, PyObject *recorder)
{
    set_reference(&active, recorder == Py_None ? NULL : Py_NewRef(recorder));
    Py_RETURN_NONE;
}

static PyObject *active_recorder(PyObject *module, PyObject *none)
{
    return Py_NewRef(active ? active : Py_None);
}

/* Calls what a call of a module was before it was intercepted. */
static PyObject *call_original(PyObject *self, PyObject *const *args, Py_ssize_t count,
                               PyObject *names)
{
    const Py_ssize_t num_names = names ? PyTuple_Size(names) : 0;
    PyObject *all = PyTuple_New(count + 1), *kwargs = all && num_names ? PyDict_New() : NULL;
    PyObject *result = NULL;
    int failed = !all || (num_names && !kwargs);
    for (Py_ssize_t each = 0; !failed && each <= count; each++)
        failed = PyTuple_SetItem(all, each, Py_NewRef(each ? args[each - 1] : self));
    for (Py_ssize_t each = 0; !failed && each < num_names; each++)
        failed = PyDict_SetItem(kwargs, PyTuple_GetItem(names, each), args[count + each]);
    if (!failed)
        result = PyObject_Call(known.call_module, all, kwargs);
    Py_XDECREF(all);
    Py_XDECREF(kwargs);
    return result;
}

/* `__call__` of modules while models are recorded. */
static PyObject *call_module(PyObject *self, PyObject *const *args, Py_ssize_t count,
                             PyObject *names)
{
    if (!active || self == ((struct recorder *)active)->root)
        return call_original(self, args, count, names);
    PyObject *result = record_module(self, args, count, names);
    if (result != Py_NotImplemented)
        return result;
    Py_DECREF(result);
    return call_original(self, args, count, names);
}

static PyMethodDef method_of_modules = {
    "__call__",
    (PyCFunction)(void (*)(void))call_module,
    METH_FASTCALL | METH_KEYWORDS,
    "Record a call of a module.",
};

static PyObject *intercepted(PyObject *module, PyObject *kind)
{
    if (PyType_Check(kind))
        return PyDescr_NewMethod((PyTypeObject *)kind, &method_of_modules);
    return PyErr_Format(PyExc_TypeError, "%R is not a class", kind);
}

/* `isinstance` while models are recorded: lazy values are tensors. */
static PyObject *is_instance(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "isinstance expected 2 arguments, got %zd", count);
    const int is_lazy = (PyObject *)Py_TYPE(args[0]) == known.lazy && args[1] != known.lazy;
    const int is = PyObject_IsInstance(is_lazy ? known.like : args[0], args[1]);
    return is < 0 ? NULL : PyBool_FromLong(is);
}

PyMethodDef recorder_functions[] = {
    {"setup", (PyCFunction)(void (*)(void))setup, METH_VARARGS | METH_KEYWORDS,
     "Take the types and functions of Python that recording needs."},
    {"activate", activate, METH_O, "Let a recorder, or None, record on this thread."},
    {"active_recorder", active_recorder, METH_NOARGS, "The recorder of this thread, or None."},
    {"intercepted", intercepted, METH_O, "A method that records calls of a class of modules."},
    {"is_instance", (PyCFunction)(void (*)(void))is_instance, METH_FASTCALL,
     "isinstance for which lazy values are tensors."},
    {NULL, NULL, 0, NULL},
};

extern PyType_Spec spec_of_function, spec_of_lookup, spec_of_recorder, spec_of_snapshot,
    spec_of_value;

/* Adds a type to the module, and keeps it for this file's users. */
static int add_type(PyObject *module, PyType_Spec *spec, PyObject **place)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (!type)
        return -1;
    set_reference(place, type);
    return PyModule_AddType(module, (PyTypeObject *)type);
}

int add_recorder_types(PyObject *module)
{
    static PyObject *value_type;
    return add_type(module, &spec_of_value, &value_type) ||
                   add_type(module, &spec_of_function, &function_type) ||
                   add_type(module, &spec_of_snapshot, &snapshot_type) ||
                   add_type(module, &spec_of_lookup, &lookup_type) ||
                   add_type(module, &spec_of_recorder, &recorder_type)
               ? -1
               : 0;
}
