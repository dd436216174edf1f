/* The structure of an example as bytes, of which autobatch/cache.py has the definition.

   Each item is a letter and what tells it from others: t and l are tuples and lists with the number
   of their items, which follow; d is a dict, whose keys and values follow; i, f, s and b are plain
   values; x is a tensor by dtype and shape, and r one that was met before. So (1, [2.5]) is written
   as t 2, i 1, l 1, f 2.5. */

#include "recorder.h"
#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 1 << 20 };

struct writer {
    char *bytes;
    int64_t size, room;
    PyObject **todo; /* borrowed; the next one last */
    int64_t waiting, todo_room;
    PyObject *tensors, *numbers; /* a list, and by address the place of each in it */
};

static int put(struct writer *w, const void *data, int64_t size)
{
    char *const bytes = grown(w->bytes, w->size + size, &w->room, 1);
    if (!bytes)
        return -1;
    w->bytes = bytes;
    memcpy(bytes + w->size, data, size);
    w->size += size;
    return 1;
}

static int put_word(struct writer *w, char letter, int64_t word)
{
    char data[1 + sizeof word] = {letter};
    memcpy(data + 1, &word, sizeof word);
    return put(w, data, sizeof data);
}

static int put_text(struct writer *w, char letter, const char *text, int64_t size)
{
    return put_word(w, letter, size) < 0 ? -1 : put(w, text, size);
}

/* Makes room for items that are written next; returns where the first goes, which is the last. */
static PyObject **make_room(struct writer *w, int64_t items)
{
    PyObject **const todo = grown(w->todo, w->waiting + items + 1, &w->todo_room, sizeof *w->todo);
    if (!todo)
        return NULL;
    w->todo = todo;
    w->waiting += items;
    return todo + w->waiting - 1;
}

/* The functions that follow return 1, 0 for items that only Python knows, or -1 with an exception
   set. */

static int write_sequence(struct writer *w, PyObject *sequence, int is_tuple)
{
    const Py_ssize_t count = is_tuple ? PyTuple_Size(sequence) : PyList_Size(sequence);
    PyObject **place = make_room(w, count);
    if (!place)
        return -1;
    for (Py_ssize_t each = 0; each < count; each++)
        *place-- = is_tuple ? PyTuple_GetItem(sequence, each) : PyList_GetItem(sequence, each);
    return put_word(w, is_tuple ? 't' : 'l', count);
}

static int write_dict(struct writer *w, PyObject *dict)
{
    const Py_ssize_t count = PyDict_Size(dict);
    PyObject **place = make_room(w, 2 * count), *key, *value;
    Py_ssize_t position = 0;
    if (!place)
        return -1;
    while (PyDict_Next(dict, &position, &key, &value)) {
        *place-- = key;
        *place-- = value;
    }
    return put_word(w, 'd', count);
}

static int write_integer(struct writer *w, PyObject *integer)
{
    int overflow;
    const int64_t value = PyLong_AsLongLongAndOverflow(integer, &overflow);
    return overflow ? 0 : put_word(w, 'i', value);
}

static int write_float(struct writer *w, PyObject *number)
{
    const double value = PyFloat_AsDouble(number);
    int64_t word;
    memcpy(&word, &value, sizeof word);
    return put_word(w, 'f', word);
}

static int write_text(struct writer *w, PyObject *text)
{
    Py_ssize_t size;
    const char *const data = PyUnicode_AsUTF8AndSize(text, &size);
    if (data)
        return put_text(w, 's', data, size);
    if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError))
        return -1;
    PyErr_Clear(); /* half of a surrogate pair, which Python compares */
    return 0;
}

static int write_bytes(struct writer *w, PyObject *bytes)
{
    char *data;
    Py_ssize_t size;
    return PyBytes_AsStringAndSize(bytes, &data, &size) ? -1 : put_text(w, 'b', data, size);
}

static int write_shape(struct writer *w, PyObject *shape)
{
    const Py_ssize_t count = PyTuple_Size(shape);
    if (count < 0 || put_word(w, 'x', count) < 0)
        return -1;
    for (Py_ssize_t each = 0; each < count; each++) {
        const int64_t size = PyLong_AsLongLong(PyTuple_GetItem(shape, each));
        if ((size < 0 && PyErr_Occurred()) || put(w, &size, sizeof size) < 0)
            return -1;
    }
    return 1;
}

static int write_new_tensor(struct writer *w, PyObject *tensor)
{
    static PyObject *shape_name, *dtype_name, *gradient_name;
    PyObject *shape = attribute_of(tensor, &shape_name, "shape");
    PyObject *dtype = shape ? attribute_of(tensor, &dtype_name, "dtype") : NULL;
    PyObject *gradient = dtype ? attribute_of(tensor, &gradient_name, "requires_grad") : NULL;
    int written = gradient ? write_shape(w, shape) : -1;
    if (written > 0) /* dtypes are never freed */
        written = put_word(w, gradient == Py_True ? 'g' : 'n', (int64_t)(intptr_t)dtype);
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    Py_XDECREF(gradient);
    return written;
}

static int write_tensor(struct writer *w, PyObject *tensor)
{
    PyObject *address = PyLong_FromVoidPtr(tensor);
    PyObject *known_number = address ? PyDict_GetItemWithError(w->numbers, address) : NULL;
    int written = -1;
    if (known_number) {
        written = put_word(w, 'r', PyLong_AsLongLong(known_number));
    } else if (address && !PyErr_Occurred()) {
        PyObject *number = PyLong_FromSsize_t(PyList_Size(w->tensors));
        if (number && !PyDict_SetItem(w->numbers, address, number) &&
            !PyList_Append(w->tensors, tensor))
            written = write_new_tensor(w, tensor);
        Py_XDECREF(number);
    }
    Py_XDECREF(address);
    return written;
}

static int write_item(struct writer *w, PyObject *item)
{
    if (PyLong_CheckExact(item))
        return write_integer(w, item);
    if (PyTuple_CheckExact(item))
        return write_sequence(w, item, 1);
    if (PyUnicode_CheckExact(item))
        return write_text(w, item);
    if ((PyObject *)Py_TYPE(item) == known.tensor)
        return write_tensor(w, item);
    if (PyList_CheckExact(item))
        return write_sequence(w, item, 0);
    if (PyFloat_CheckExact(item))
        return write_float(w, item);
    if (PyDict_CheckExact(item))
        return write_dict(w, item);
    if (PyBytes_CheckExact(item))
        return write_bytes(w, item);
    if (item == Py_None || PyBool_Check(item))
        return put(w, item == Py_None ? "N" : item == Py_True ? "T" : "F", 1);
    return 0;
}

/* structure(example): The structure, and a list of its tensors; None if only Python can tell. */
static PyObject *structure(PyObject *self, PyObject *example)
{
    struct writer w = {.tensors = PyList_New(0), .numbers = PyDict_New()};
    int written = w.tensors && w.numbers ? 1 : -1;
    if (written > 0) {
        PyObject **const place = make_room(&w, 1);
        written = place ? 1 : -1;
        if (place)
            *place = example;
    }
    while (written > 0 && w.waiting)
        written = w.size > MOST_BYTES ? 0 : write_item(&w, w.todo[--w.waiting]);
    PyObject *result = NULL;
    if (written > 0) {
        PyObject *bytes = PyBytes_FromStringAndSize(w.bytes, w.size);
        result = bytes ? PyTuple_Pack(2, bytes, w.tensors) : NULL;
        Py_XDECREF(bytes);
    } else if (!written) {
        result = Py_NewRef(Py_None);
    }
    free(w.bytes);
    free(w.todo);
    Py_XDECREF(w.tensors);
    Py_XDECREF(w.numbers);
    return result;
}

PyMethodDef structure_functions[] = {
    {"structure", structure, METH_O, "The structure of an example, and its tensors."},
    {NULL, NULL, 0, NULL},
};
