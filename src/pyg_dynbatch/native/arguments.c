/* Reading the arguments of Python calls: see arguments.h. */

#include "arguments.h"
#include <string.h>

int64_t read_argument(PyObject *given)
{
    if (given == Py_None)
        return 0;
    if (PyLong_Check(given))
        return PyLong_AsLongLong(given);
    if (PyObject_CheckBuffer(given)) {
        Py_buffer view;
        if (PyObject_GetBuffer(given, &view, PyBUF_SIMPLE))
            return -1;
        const int64_t address = (int64_t)(intptr_t)view.buf;
        PyBuffer_Release(&view); /* the caller keeps the object alive */
        return address;
    }
    PyObject *address = PyObject_CallMethod(given, "data_ptr", NULL);
    if (!address)
        return -1;
    const int64_t found = PyLong_AsLongLong(address);
    Py_DECREF(address);
    return found;
}

int read_arguments(PyObject *const *args, Py_ssize_t count, int wanted, int64_t *into)
{
    if (count != wanted) {
        PyErr_Format(PyExc_TypeError, "expected %d arguments, got %zd", wanted, count);
        return -1;
    }
    for (int each = 0; each < wanted; each++) {
        into[each] = read_argument(args[each]);
        if (into[each] == -1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

int read_fields(const struct field *fields, int count, PyObject *const *args, Py_ssize_t positional,
                PyObject *names, void *into)
{
    const Py_ssize_t given = names ? PyTuple_Size(names) : 0;
    int next = 0;
    if (positional) {
        PyErr_SetString(PyExc_TypeError, "native functions take keyword arguments only");
        return -1;
    }
    for (int each = 0; each < count; each++)
        memset((char *)into + fields[each].place, 0, sizeof(int64_t));
    for (Py_ssize_t each = 0; each < given; each++) {
        PyObject *name = PyTuple_GetItem(names, each);
        int tried = 0;
        while (tried < count && PyUnicode_CompareWithASCIIString(name, fields[next].name)) {
            next = (next + 1) % count;
            tried++;
        }
        if (tried == count) {
            PyErr_Format(PyExc_TypeError, "unexpected keyword argument %R", name);
            return -1;
        }
        if (fields[next].is_number && !PyLong_Check(args[each])) {
            PyErr_Format(PyExc_TypeError, "%R is not an integer", name);
            return -1;
        }
        const int64_t value = read_argument(args[each]);
        if (value == -1 && PyErr_Occurred())
            return -1;
        memcpy((char *)into + fields[next].place, &value, sizeof value);
        next = (next + 1) % count;
    }
    return 0;
}

PyObject *attribute_of(PyObject *owner, PyObject **name, const char *text)
{
    if (!*name && !(*name = PyUnicode_InternFromString(text)))
        return NULL;
    return PyObject_GetAttr(owner, *name);
}
