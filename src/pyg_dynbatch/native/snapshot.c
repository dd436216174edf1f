/* Snapshots of modules, by which their changes are noticed.

   Of a module with one parameter and no buffers: `dicts` are its __dict__ and those of its
   parameters and buffers, whose values are compared one by one; `sized` are its dictionaries of
   hooks, lists and dicts, which are compared by size; of `tensors`, its parameter, requires_grad and
   dtype are. */

#include "recorder.h"

enum { FACTS = 2 }; /* of a tensor */

struct snapshot {
    PyObject_HEAD
    PyObject *dicts, *sized, *tensors; /* tuples */
    PyObject **values;                 /* of `dicts`; then the facts of `tensors` */
    Py_ssize_t count, *sizes;          /* of `values`; of `dicts`, then of `sized` */
    int is_current;
};

static void drop_values(struct snapshot *s)
{
    for (Py_ssize_t each = 0; each < s->count; each++)
        Py_CLEAR(s->values[each]);
    PyMem_Free(s->values);
    PyMem_Free(s->sizes);
    s->values = NULL;
    s->sizes = NULL;
    s->count = 0;
    s->is_current = 0;
}

/* Stores a value, or compares it with the one that is stored: 1 if it is the same. */
static int visit_value(struct snapshot *s, Py_ssize_t at, PyObject *value, int is_taking)
{
    if (!is_taking)
        return at < s->count && s->values[at] == value;
    set_reference(s->values + at, Py_NewRef(value));
    return 1;
}

/* The same for a fact, which is equal rather than the same; -1 for errors. */
static int visit_fact(struct snapshot *s, Py_ssize_t at, PyObject *value, int is_taking)
{
    if (is_taking || visit_value(s, at, value, 0))
        return visit_value(s, at, value, is_taking);
    return at < s->count ? PyObject_RichCompareBool(s->values[at], value, Py_EQ) : 0;
}

static int visit_size(struct snapshot *s, Py_ssize_t at, Py_ssize_t size, int is_taking)
{
    if (is_taking)
        s->sizes[at] = size;
    return s->sizes[at] == size;
}

/* Goes through all values; stores them, or compares: 1 if all are the same, -1 for errors. */
static int visit_all(struct snapshot *s, int is_taking)
{
    static PyObject *names[FACTS];
    static const char *const texts[FACTS] = {"requires_grad", "dtype"};
    const Py_ssize_t dicts = PyTuple_Size(s->dicts), sized = PyTuple_Size(s->sized);
    const Py_ssize_t tensors = PyTuple_Size(s->tensors);
    Py_ssize_t at = 0;
    for (Py_ssize_t each = 0; each < dicts; each++) {
        PyObject *dict = PyTuple_GetItem(s->dicts, each), *name, *value;
        Py_ssize_t place = 0;
        if (!visit_size(s, each, PyDict_Size(dict), is_taking))
            return 0;
        while (PyDict_Next(dict, &place, &name, &value))
            if (!visit_value(s, at++, value, is_taking))
                return 0;
    }
    for (Py_ssize_t each = 0; each < sized; each++)
        if (!visit_size(s, dicts + each, PyObject_Size(PyTuple_GetItem(s->sized, each)), is_taking))
            return 0;
    for (Py_ssize_t each = 0; each < FACTS * tensors; each++) {
        const int fact = each % FACTS;
        PyObject *value =
            attribute_of(PyTuple_GetItem(s->tensors, each / FACTS), names + fact, texts[fact]);
        if (!value)
            return -1;
        const int is_same = visit_fact(s, at++, value, is_taking);
        Py_DECREF(value);
        if (is_same != 1)
            return is_same;
    }
    return 1;
}

int is_unchanged(const struct site *site)
{
    const Py_ssize_t parts = PyTuple_Size(site->parts);
    int is_same = 1;
    for (Py_ssize_t each = 0; is_same == 1 && each < parts; each++) {
        struct snapshot *const s = (struct snapshot *)PyTuple_GetItem(site->parts, each);
        is_same = s->is_current ? visit_all(s, 0) : 0;
    }
    return is_same;
}

/* The number of values of a tuple of dictionaries; -1 with an exception set. */
static Py_ssize_t count_values(PyObject *dicts)
{
    Py_ssize_t count = 0;
    for (Py_ssize_t each = 0; each < PyTuple_Size(dicts); each++) {
        const Py_ssize_t size = PyDict_Size(PyTuple_GetItem(dicts, each));
        if (size < 0)
            return -1;
        count += size;
    }
    return count;
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
    set_reference(&s->dicts, Py_NewRef(dicts));
    set_reference(&s->sized, Py_NewRef(sized));
    set_reference(&s->tensors, Py_NewRef(tensors));
    const Py_ssize_t count = count_values(dicts);
    if (count < 0)
        return NULL;
    const Py_ssize_t values = count + FACTS * PyTuple_Size(tensors);
    s->sizes = PyMem_Calloc(PyTuple_Size(dicts) + PyTuple_Size(sized), sizeof *s->sizes);
    s->values = PyMem_Calloc(values, sizeof *s->values);
    if (!s->values || !s->sizes)
        return PyErr_NoMemory();
    s->count = values;
    if (visit_all(s, 1) < 0)
        return NULL;
    s->is_current = 1;
    Py_RETURN_NONE;
}

static PyObject *same(PyObject *self, PyObject *none)
{
    struct snapshot *const s = (struct snapshot *)self;
    const int is_same = s->is_current ? visit_all(s, 0) : 0;
    return is_same < 0 ? NULL : PyBool_FromLong(is_same);
}

static PyObject *drop(PyObject *self, PyObject *none)
{
    ((struct snapshot *)self)->is_current = 0;
    Py_RETURN_NONE;
}

static int traverse_snapshot(PyObject *self, visitproc visit, void *arg)
{
    struct snapshot *const s = (struct snapshot *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(s->dicts);
    Py_VISIT(s->sized);
    Py_VISIT(s->tensors);
    for (Py_ssize_t each = 0; each < s->count; each++)
        Py_VISIT(s->values[each]);
    return 0;
}

static int clear_snapshot(PyObject *self)
{
    struct snapshot *const s = (struct snapshot *)self;
    drop_values(s);
    Py_CLEAR(s->dicts);
    Py_CLEAR(s->sized);
    Py_CLEAR(s->tensors);
    return 0;
}

static void free_snapshot(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    clear_snapshot(self);
    free_object(self);
}

static PyMethodDef methods_of_snapshot[] = {
    {"take", take, METH_VARARGS, "Keep the values of dicts, sizes of dicts, types of tensors."},
    {"same", same, METH_NOARGS, "Whether all is unchanged since it was taken."},
    {"drop", drop, METH_NOARGS, "Forget what was taken."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots_of_snapshot[] = {
    {Py_tp_traverse, traverse_snapshot},
    {Py_tp_clear, clear_snapshot},
    {Py_tp_dealloc, free_snapshot},
    {Py_tp_methods, methods_of_snapshot},
    {0, NULL},
};
PyType_Spec spec_of_snapshot = {
    .name = "pyg_dynbatch._native.Snapshot",
    .basicsize = sizeof(struct snapshot),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots_of_snapshot,
};
