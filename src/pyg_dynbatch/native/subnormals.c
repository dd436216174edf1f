/* Lets the threads of torch round subnormal numbers to zero: gradients behind saturated gates are
   subnormal, with which some processors compute many times slower.

   The mode is a register of each thread; torch and its products run in the threads of OpenMP. */

#include "arguments.h"
#include <string.h>

#if defined(__SSE__) && defined(_OPENMP) && (!defined(__clang__) || defined(__APPLE__))
#define HAS_MODES 1
#include <xmmintrin.h>
int omp_get_thread_num(void);
#else
#define HAS_MODES 0
#endif

/* Results to zero, and operands. */
enum { FLUSHED = 0x8000 | 0x0040 };

/* flush_subnormals(threads): Set the mode of all threads; return what the modes were. */
static PyObject *flush_subnormals(PyObject *module, PyObject *args)
{
    int threads;
    if (!PyArg_ParseTuple(args, "i", &threads))
        return NULL;
    if (!HAS_MODES || threads < 1)
        return PyBytes_FromStringAndSize(NULL, 0);
    PyObject *before = PyBytes_FromStringAndSize(NULL, threads * (Py_ssize_t)sizeof(uint32_t));
    if (!before)
        return NULL;
    uint32_t *const modes = (uint32_t *)PyBytes_AsString(before);
    memset(modes, 0, threads * sizeof *modes); /* no mode: of threads that do not come */
#if HAS_MODES
#pragma omp parallel num_threads(threads)
    {
        const uint32_t mode = _mm_getcsr();
        modes[omp_get_thread_num()] = mode;
        _mm_setcsr(mode | FLUSHED);
    }
#endif
    return before;
}

/* restore_subnormals(modes): Give all threads the modes that they had. */
static PyObject *restore_subnormals(PyObject *module, PyObject *before)
{
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(before, &bytes, &size))
        return NULL;
    const int threads = (int)(size / (Py_ssize_t)sizeof(uint32_t));
#if HAS_MODES
    if (threads > 0) {
        const uint32_t *const modes = (const uint32_t *)bytes;
#pragma omp parallel num_threads(threads)
        {
            const uint32_t mode = modes[omp_get_thread_num()];
            if (mode)
                _mm_setcsr(mode);
        }
    }
#endif
    return PyLong_FromLong(threads);
}

PyMethodDef subnormals_functions[] = {
    {"flush_subnormals", flush_subnormals, METH_VARARGS, "Round subnormal numbers to zero."},
    {"restore_subnormals", restore_subnormals, METH_O, "Restore the modes of all threads."},
    {NULL, NULL, 0, NULL},
};
