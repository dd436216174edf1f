/* Snapshots of modules, by which their changes are noticed. */

#include "recorder.h"
#include <stdlib.h>

struct snapshot {
    PyObject_HEAD
    PyObject *dicts, *sized, *tensors; /* tuples: compared by values, by size, by their types */
    PyObject **values;                 /* of `dicts`; then requires_grad and dtype of `tensors` */
    int64_t count, *sizes;
    int is_current;
};

static void drop_values(struct snapshot *s)
{
    for (int64_t each = 0; each < s->count; each++)
        Py_XDECREF(s->values[each]);
    free(s->values);
    free(s->sizes);
    s->values = NULL;
    s->sizes = NULL;
    s->count = 0;
    s->is_current = 0;
}

/* Goes through all values; stores them, or compares: 1 if all are the same, -1 for errors. */
static int visit(struct snapshot *s, int is_taking)
{
    const int64_t dicts = PyTuple_Size(s->dicts), sized = PyTuple_Size(s->sized);
    const int64_t tensors = PyTuple_Size(s->tensors);
    int64_t at = 0;
    for (int64_t each = 0; each < dicts; each++) {
        PyObject *dict = PyTuple_GetItem(s->dicts, each), *name, *value;
        Py_ssize_t place = 0;
        if (is_taking)
            s->sizes[each] = PyDict_Size(dict);
        else if (s->sizes[each] != PyDict_Size(dict))
            return 0;
        while (PyDict_Next(dict, &place, &name, &value)) {
            if (is_taking) {
                Py_INCREF(value);
                s->values[at] = value;
            } else if (s->values[at] != value)
                return 0;
            at++;
        }
    }
    for (int64_t each = 0; each < sized; each++) {
        const int64_t size = PyDict_Size(PyTuple_GetItem(s->sized, each));
        if (is_taking)
            s->sizes[dicts + each] = size;
        else if (s->sizes[dicts + each] != size)
            return 0;
    }
    static PyObject *names[2];
    for (int64_t each = 0; each < 2 * tensors; each++, at++) {
        PyObject *value = attribute_of(PyTuple_GetItem(s->tensors, each / 2), names + each % 2,
                                       each % 2 ? "dtype" : "requires_grad");
        if (!value)
            return -1;
        if (is_taking)
            s->values[at] = value;
        else {
            Py_DECREF(value);
            if (s->values[at] != value)
                return 0;
        }
    }
    return 1;
}

int is_unchanged(const struct site *site)
{
    const int64_t parts = PyTuple_Size(site->parts);
    int is_same = 1;
    for (int64_t each = 0; is_same == 1 && each < parts; each++) {
        struct snapshot *s = (struct snapshot *)PyTuple_GetItem(site->parts, each);
        is_same = s->is_current ? visit(s, 0) : 0;
    }
    return is_same;
}

/* take(dicts, sized, tensors): what is compared from now on. */
static PyObject *take(PyObject *self, PyObject *args)
{
    struct snapshot *const s = (struct snapshot *)self;
    PyObject *dicts, *sized, *tensors;
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &dicts, &PyTuple_Type, &sized,
                          &PyTuple_Type, &tensors))
        return NULL;
    drop_values(s);
    PyObject *const before[] = {s->dicts, s->sized, s->tensors};
    Py_INCREF(s->dicts = dicts);
    Py_INCREF(s->sized = sized);
    Py_INCREF(s->tensors = tensors);
    for (int each = 0; each < COUNT(before); each++)
        Py_XDECREF(before[each]);
    int64_t count = 2 * PyTuple_Size(tensors);
    for (int64_t each = 0; each < PyTuple_Size(dicts); each++)
        count += PyDict_Size(PyTuple_GetItem(dicts, each));
    s->values = calloc(count + 1, sizeof *s->values);
    s->sizes = calloc(PyTuple_Size(dicts) + PyTuple_Size(sized) + 1, sizeof *s->sizes);
    if (!s->values || !s->sizes)
        return PyErr_NoMemory();
    s->count = count;
    if (visit(s, 1) < 0)
        return NULL;
    s->is_current = 1;
    Py_RETURN_NONE;
}

static PyObject *same(PyObject *self, PyObject *none)
{
    struct snapshot *const s = (struct snapshot *)self;
    const int is_same = s->is_current ? visit(s, 0) : 0;
    return is_same < 0 ? NULL : PyBool_FromLong(is_same);
}

static PyObject *drop(PyObject *self, PyObject *none)
{
    ((struct snapshot *)self)->is_current = 0;
    Py_RETURN_NONE;
}

static void free_snapshot(PyObject *self)
{
    struct snapshot *const s = (struct snapshot *)self;
    drop_values(s);
    Py_CLEAR(s->dicts);
    Py_CLEAR(s->sized);
    Py_CLEAR(s->tensors);
    free_object(self);
}

static PyMethodDef methods_of_snapshot[] = {
    {"take", take, METH_VARARGS, "Keep the values of dicts, sizes of dicts, types of tensors."},
    {"same", same, METH_NOARGS, "Whether all is unchanged since it was taken."},
    {"drop", drop, METH_NOARGS, "Forget what was taken."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots_of_snapshot[] = {
    {Py_tp_dealloc, free_snapshot}, {Py_tp_methods, methods_of_snapshot}, {0, NULL},
};
PyType_Spec spec_of_snapshot = {
    "pyg_dynbatch._native.Snapshot", sizeof(struct snapshot), 0, Py_TPFLAGS_DEFAULT,
    slots_of_snapshot,
};
