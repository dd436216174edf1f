/* Reading the arguments of Python calls: integers, and the addresses of arrays.

   An argument is an integer, None (0), an object with the buffer protocol such as bytes or a NumPy
   array (the address of its first number), or a tensor (what its `data_ptr` returns). The caller
   keeps the objects alive and checks types and sizes: addresses are not checked. Where a struct has
   a number, an array is refused. */

#ifndef PYG_DYNBATCH_ARGUMENTS_H
#define PYG_DYNBATCH_ARGUMENTS_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

_Static_assert(sizeof(void *) == sizeof(int64_t), "addresses are read as 64-bit integers");

/* A field of a struct that keyword arguments fill: an int64_t or a pointer. */
struct field {
    const char *name;
    size_t place;
    int is_number; /* or a pointer */
};
#define FIELD(type, name)                                                                          \
    {#name, offsetof(struct type, name), _Generic(((struct type *)0)->name, int64_t: 1, default: 0)}

/* The number or address that an argument stands for; -1 with an exception set if it is neither. */
int64_t read_argument(PyObject *given);

/* Reads exactly `wanted` positional arguments; returns -1 with an exception set if that fails. */
int read_arguments(PyObject *const *args, Py_ssize_t count, int wanted, int64_t *into);

/* Fills a struct of `count` fields from keyword arguments; fields that are not given become 0.
   Returns -1 with an exception set for positional arguments and unknown names. Fastest if keywords
   are in the order of the fields. */
int read_fields(const struct field *fields, int count, PyObject *const *args, Py_ssize_t positional,
                PyObject *names, void *into);

/* An attribute; its name is interned on first use. */
PyObject *attribute_of(PyObject *owner, PyObject **name, const char *text);

enum { INVALID = -2 }; /* what functions that check their arguments return */

/* A function `native_name` of Python that fills `struct name` and returns what `name` returns, or
   raises MemoryError for -1. */
#define FUNCTION(name)                                                                             \
    static PyObject *native_##name(PyObject *module, PyObject *const *args, Py_ssize_t count,      \
                                   PyObject *names)                                                \
    {                                                                                              \
        struct name arguments;                                                                     \
        memset(&arguments, 0, sizeof arguments);                                                   \
        if (read_fields(fields_of_##name, COUNT(fields_of_##name), args, count, names,             \
                        &arguments))                                                               \
            return NULL;                                                                           \
        PyThreadState *state = PyEval_SaveThread();                                                \
        const int64_t result = name(&arguments);                                                   \
        PyEval_RestoreThread(state);                                                               \
        return result == -1 ? PyErr_NoMemory() : PyLong_FromLongLong(result);                      \
    }
#define METHOD(name, does)                                                                         \
    {#name, (PyCFunction)(void (*)(void))native_##name, METH_FASTCALL | METH_KEYWORDS, does}

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

#endif
