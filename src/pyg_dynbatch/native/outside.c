/* Tensors from outside the model: a tensor of a known shape and dtype becomes a row, as
   Session.outside_row of autobatch/session.py does it, in the same attributes.

   For the second tensor of a shape, if rows 0 to 6 of its row type are taken: the record is the
   site of its row type and 7, and the tensor is appended to the list of the site in `outside`. */

#include "recorder.h"

/* Facts of a tensor: attributes, then what methods without arguments return. */
enum { DTYPE, SHAPE, DEVICE, VERSION, BASE, IS_CPU, GRADIENT };
enum { DIM = GRADIENT + 1, ITEM, INFERENCE, STORAGE, RESIZABLE };

static PyObject *fact_of(PyObject *tensor, int fact)
{
    static PyObject *names[RESIZABLE + 1];
    static const char *const texts[] = {
        "dtype",         "shape", "device", "_version",     "_base",           "is_cpu",
        "requires_grad", "dim",   "item",   "is_inference", "untyped_storage", "resizable",
    };
    PyObject *attribute = attribute_of(tensor, names + fact, texts[fact]);
    if (!attribute || fact < DIM)
        return attribute;
    PyObject *answer = PyObject_CallNoArgs(attribute);
    Py_DECREF(attribute);
    return answer;
}

/* Whether a fact equals an object; -1 with an exception set. */
static int fact_is(PyObject *tensor, int fact, PyObject *expected)
{
    PyObject *value = fact_of(tensor, fact);
    if (!value)
        return -1;
    const int is_equal = PyObject_RichCompareBool(value, expected, Py_EQ);
    Py_DECREF(value);
    return is_equal;
}

/* Whether an object is a parameter or buffer of the model; -1 with an exception set. */
static int belongs(const struct recorder *r, PyObject *object)
{
    PyObject *address = PyLong_FromVoidPtr(object);
    if (!address)
        return -1;
    const int is_own = PyDict_Contains(r->belonging, address);
    Py_DECREF(address);
    return is_own;
}

/* Whether a tensor is neither a parameter or buffer of the model nor a view of one. */
static int is_foreign(const struct recorder *r, PyObject *tensor)
{
    int is_own = belongs(r, tensor);
    if (is_own)
        return is_own < 0 ? -1 : 0;
    PyObject *base = fact_of(tensor, BASE);
    if (!base)
        return -1;
    is_own = base == Py_None ? 0 : belongs(r, base);
    Py_DECREF(base);
    return is_own < 0 ? -1 : !is_own;
}

/* Finds the value that stands for a number in a tensor and was met before. */
static int find_number(const struct recorder *r, PyObject *tensor, PyObject **row)
{
    PyObject *dtype = fact_of(tensor, DTYPE);
    if (!dtype)
        return -1;
    PyObject *numbers = PyDict_GetItemWithError(r->numbers, dtype);
    Py_DECREF(dtype);
    if (!numbers)
        return PyErr_Occurred() ? -1 : 0;
    int is_number = fact_is(tensor, DIM, known.zero);
    if (is_number == 1)
        is_number = fact_is(tensor, IS_CPU, Py_True);
    if (is_number != 1)
        return is_number;
    PyObject *number = fact_of(tensor, ITEM);
    if (!number)
        return -1;
    *row = Py_XNewRef(PyDict_GetItemWithError(numbers, number));
    Py_DECREF(number);
    return !*row && PyErr_Occurred() ? -1 : 0;
}

/* Finds the value of a tensor that was met before and is as it was; `is_known` tells whether the
   tensor was met at all. */
static int find_known(const struct recorder *r, PyObject *tensor, PyObject *address, int *is_known,
                      PyObject **row)
{
    PyObject *met = PyDict_GetItemWithError(r->known, address);
    *is_known = met != NULL;
    if (!met)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *version = PyTuple_GetItem(met, 2); /* or a copy */
    if (!version)
        return -1;
    const int is_same = PyLong_CheckExact(version) ? fact_is(tensor, VERSION, version) : 0;
    if (is_same == 1)
        *row = Py_XNewRef(PyTuple_GetItem(met, 0));
    return is_same < 0 || (is_same && !*row) ? -1 : 0;
}

/* Whether a tensor has a dimension and is on the model's device, needs no gradient, and torch
   counts its changes. */
static int is_simple(const struct recorder *r, PyObject *tensor)
{
    const int is_number = fact_is(tensor, DIM, known.zero);
    if (is_number)
        return is_number < 0 ? -1 : 0;
    int is = fact_is(tensor, GRADIENT, Py_False);
    if (is == 1)
        is = fact_is(tensor, INFERENCE, Py_False);
    if (is == 1)
        is = fact_is(tensor, DEVICE, r->device);
    if (is != 1)
        return is;
    PyObject *wrapped = PyObject_CallFunctionObjArgs(known.is_wrapped, tensor, NULL);
    if (!wrapped)
        return -1;
    const int is_wrapped = wrapped != Py_False;
    Py_DECREF(wrapped);
    if (is_wrapped)
        return 0;
    PyObject *storage = fact_of(tensor, STORAGE);
    if (!storage)
        return -1;
    is = fact_is(storage, RESIZABLE, Py_True);
    Py_DECREF(storage);
    return is;
}

/* A place for rows of the shape and dtype of a tensor. */
struct source {
    PyObject *site, *rows; /* borrowed; NULL if there are none */
    PyObject *kind;        /* owned */
};

static int find_source(const struct recorder *r, PyObject *tensor, struct source *source)
{
    static PyObject *name;
    PyObject *shape = fact_of(tensor, SHAPE);
    PyObject *dtype = shape ? fact_of(tensor, DTYPE) : NULL;
    PyObject *key = dtype ? PyTuple_Pack(2, shape, dtype) : NULL;
    PyObject *kinds = NULL;
    *source = (struct source){0};
    if (key)
        source->site = PyDict_GetItemWithError(r->like, key);
    if (source->site)
        source->rows = PyDict_GetItemWithError(r->outside, source->site);
    if (source->rows)
        kinds = attribute_of(source->site, &name, "kinds");
    if (kinds)
        source->kind = Py_XNewRef(PyTuple_GetItem(kinds, 0));
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    Py_XDECREF(key);
    Py_XDECREF(kinds);
    return PyErr_Occurred() ? -1 : 0;
}

/* Appends a tensor to the rows of its site, of which it is row `number`; returns its value. */
static PyObject *append_row(struct recorder *r, const struct source *source, PyObject *tensor,
                            PyObject *address, int64_t number)
{
    const int64_t site = add_site((struct lookup *)r->lookup, source->site);
    if (site < 0 || number < 0 || number >= INT32_MAX) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_OverflowError, "too many rows from outside");
        return NULL;
    }
    const int32_t row = (int32_t)number;
    PyObject *value = NULL, *note = NULL, *met = NULL, *version = fact_of(tensor, VERSION);
    PyObject *next = version ? PyLong_FromLongLong(number + 1) : NULL;
    if (next)
        note = PyTuple_Pack(2, tensor, version);
    if (note && !PyDict_SetItem(r->next_row, source->kind, next) &&
        !PyList_Append(source->rows, tensor) && !PyList_Append(r->unread, note))
        value = append_record(r, site, NULL, 0, &row, 1);
    if (value)
        met = PyTuple_Pack(3, value, tensor, version);
    if (!met || PyDict_SetItem(r->known, address, met))
        Py_CLEAR(value);
    Py_XDECREF(version);
    Py_XDECREF(next);
    Py_XDECREF(note);
    Py_XDECREF(met);
    return value;
}

/* Records a tensor of a known shape and dtype as a row from outside. */
static int add_row(struct recorder *r, PyObject *tensor, PyObject *address, PyObject **row)
{
    struct source source;
    if (find_source(r, tensor, &source))
        return -1;
    if (!source.kind)
        return 0;
    PyObject *next = PyDict_GetItemWithError(r->next_row, source.kind);
    int failed = !next && PyErr_Occurred();
    if (next) {
        const int64_t number = PyLong_AsLongLong(next);
        if (number != -1 || !PyErr_Occurred())
            *row = append_row(r, &source, tensor, address, number);
        failed = !*row;
    }
    Py_DECREF(source.kind);
    return failed ? -1 : 0;
}

static int find_row_at(struct recorder *r, PyObject *tensor, PyObject *address, PyObject **row)
{
    int is_known;
    if (find_known(r, tensor, address, &is_known, row))
        return -1;
    if (*row)
        return 0;
    if (find_number(r, tensor, row))
        return -1;
    if (*row || is_known)
        return 0;
    const int is = is_simple(r, tensor);
    return is == 1 ? add_row(r, tensor, address, row) : is;
}

int find_row(struct recorder *r, PyObject *tensor, PyObject **row)
{
    *row = NULL;
    if (is_watched(r) || !r->known || !r->like || !r->outside || !r->next_row || !r->unread ||
        !r->device || !r->numbers || !r->belonging)
        return 0;
    const int is = is_foreign(r, tensor);
    if (is != 1)
        return is;
    PyObject *address = PyLong_FromVoidPtr(tensor);
    if (!address)
        return -1;
    const int failed = find_row_at(r, tensor, address, row);
    Py_DECREF(address);
    return failed;
}
