/* Copies many pieces of memory in one call, without the interpreter lock and past the caches; and tells where many
 * buffers lie.
 *
 * An ordinary store first reads the line that it overwrites. What is staged is not read again by the processor that
 * copies it, so streaming stores are used where the processor has them: a third less traffic to memory. Four pages are
 * copied side by side, so that as many rows of memory are open at once.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) || defined(_M_X64)
#include <emmintrin.h>

enum { LINE = 64, PAGE = 4096, ABREAST = 4, AHEAD = 512 };

static inline void copy_line(char *to, const char *from)
{
    __m128i a = _mm_loadu_si128((const __m128i *)from);
    __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
    __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
    _mm_stream_si128((__m128i *)to, a);
    _mm_stream_si128((__m128i *)(to + 16), b);
    _mm_stream_si128((__m128i *)(to + 32), c);
    _mm_stream_si128((__m128i *)(to + 48), d);
}

static void copy_piece(char *to, const char *from, size_t size)
{
    size_t head = (size_t)(-(uintptr_t)to & (LINE - 1));
    if (head > size)
        head = size;
    memcpy(to, from, head);
    to += head, from += head, size -= head;
    for (; size >= ABREAST * PAGE; to += ABREAST * PAGE, from += ABREAST * PAGE, size -= ABREAST * PAGE)
        for (size_t line = 0; line < PAGE; line += LINE)
            for (size_t page = 0; page < ABREAST * PAGE; page += PAGE) {
                _mm_prefetch(from + page + line + AHEAD, _MM_HINT_T0);
                copy_line(to + page + line, from + page + line);
            }
    for (; size >= LINE; to += LINE, from += LINE, size -= LINE)
        copy_line(to, from);
    memcpy(to, from, size);
}

/* Streaming stores are not ordered with others: whoever is told of the copy must see it. */
static void finish(void) { _mm_sfence(); }
#else
static void copy_piece(char *to, const char *from, size_t size) { memcpy(to, from, size); }
static void finish(void) {}
#endif

static PyObject *copy(PyObject *self, PyObject *arguments)
{
    Py_buffer to, from, sizes;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "y*y*y*", &to, &from, &sizes))
        return NULL;
    int fits = to.len == from.len && to.len == sizes.len && to.len % (Py_ssize_t)sizeof(int64_t) == 0;
    if (fits) {
        Py_ssize_t count = to.len / (Py_ssize_t)sizeof(int64_t);
        const int64_t *t = to.buf, *f = from.buf, *n = sizes.buf;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count; i++)
            copy_piece((char *)(intptr_t)t[i], (const char *)(intptr_t)f[i], (size_t)n[i]);
        finish();
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    PyBuffer_Release(&sizes);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "addresses and sizes are three arrays of as many 64-bit integers");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *addresses(PyObject *self, PyObject *arguments)
{
    PyObject *parts;
    Py_buffer into, part;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "Ow*", &parts, &into))
        return NULL;
    PyObject *items = PySequence_Fast(parts, "a sequence of buffers is needed");
    int good = items != NULL;
    if (good && into.len != PySequence_Fast_GET_SIZE(items) * (Py_ssize_t)sizeof(int64_t)) {
        PyErr_SetString(PyExc_ValueError, "there is one 64-bit integer for each buffer");
        good = 0;
    }
    for (Py_ssize_t i = 0; good && i < PySequence_Fast_GET_SIZE(items); i++) {
        good = PyObject_GetBuffer(PySequence_Fast_GET_ITEM(items, i), &part, PyBUF_SIMPLE) == 0;
        if (good) {
            ((int64_t *)into.buf)[i] = (int64_t)(intptr_t)part.buf;
            PyBuffer_Release(&part);
        }
    }
    Py_XDECREF(items);
    PyBuffer_Release(&into);
    if (!good)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"addresses", addresses, METH_VARARGS, "addresses(buffers, into): where each buffer begins, into 64-bit integers."},
    {"copy", copy, METH_VARARGS, "copy(to, from, sizes): arrays of 64-bit addresses and byte counts."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_stream_copy", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__stream_copy(void) { return PyModule_Create(&module); }
