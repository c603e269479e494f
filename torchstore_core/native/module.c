/* Streaming copies for tensors, with the GIL released, inspection of many tensors at once, and records
 * of a server's log.
 *
 * Why streaming: glibc's memcpy bypasses the cache (with non-temporal stores) only above a
 * threshold that is a fraction of the last-level cache. On servers with hundreds of MB of it,
 * tensors of a few MB are therefore copied through the cache, which reads every destination line
 * before overwriting it, at half the memory's speed. A set of weights is larger than any cache, so
 * it is streamed however small its pieces are.
 *
 * Lines are copied one after the other, with the widest stores that all processors with AVX2 have: the
 * hardware follows one sequence further ahead than several that take turns.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "prefetching.h"
#include "turns.h"

#define STREAM_MIN 16384

#if defined(__x86_64__)
static void stream_line(char *to, const char *from) {
    __m128i a = _mm_loadu_si128((const __m128i *)from);
    __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
    __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
    _mm_stream_si128((__m128i *)to, a);
    _mm_stream_si128((__m128i *)(to + 16), b);
    _mm_stream_si128((__m128i *)(to + 32), c);
    _mm_stream_si128((__m128i *)(to + 48), d);
}

/* So far ahead, memory is there in time, and still in the cache of the processor's own. */
#define AHEAD 4096

#define AVX2 __attribute__((target("avx2")))

AVX2 static inline void stream_wide_line(char *to, const char *from) {
    __m256i a = _mm256_loadu_si256((const __m256i *)from);
    __m256i b = _mm256_loadu_si256((const __m256i *)(from + 32));
    _mm256_stream_si256((__m256i *)to, a);
    _mm256_stream_si256((__m256i *)(to + 32), b);
}

/* Copies one line after the other, and prefetches what follows them at ``next``, if that is known. */
#define STREAM_LINES(name, stream, alone)                                                          \
    static void name(char *dst, const char *src, size_t n, const char *next) {                     \
        size_t last = n > AHEAD ? n - AHEAD : 0;                                                   \
        for (size_t at = 0; at < n; at += 64) {                                                    \
            if (at < last) prefetch_once(src + at + AHEAD, alone);                                 \
            else if (next != NULL) prefetch_once(next + (at - last), alone);                       \
            stream(dst + at, src + at);                                                            \
        }                                                                                          \
    }
STREAM_LINES(stream_narrow_lines, stream_line, 0)
AVX2 STREAM_LINES(stream_wide_lines, stream_wide_line, 0)
AVX2 STREAM_LINES(stream_wide_lines_alone, stream_wide_line, 1)

/* The same for all whole lines of ``n`` bytes; returns how many bytes those have. */
static size_t stream_lines(char *dst, const char *src, size_t n, const char *next) {
    size_t done = 0;
    n &= ~(size_t)63;
    void (*copy)(char *, const char *, size_t, const char *) = stream_narrow_lines;
    if (__builtin_cpu_supports("avx2"))
        copy = prefetches_alone() ? stream_wide_lines_alone : stream_wide_lines;
    while (done < n) {
        size_t some = n - done < STEP ? n - done : STEP;
        copy(dst + done, src + done, some, done + some < n ? src + done + some : next);
        if (some == STEP) torchstore_take_turns();
        done += some;
    }
    return n;
}
#endif

/* Through the cache. */
static void copy_plain(char *dst, const char *src, size_t n) {
    for (; n > STEP; dst += STEP, src += STEP, n -= STEP) {
        memcpy(dst, src, STEP);
        torchstore_take_turns();
    }
    memcpy(dst, src, n);
}

/* ``next``: what is copied after it, or NULL. */
static void copy_stream(char *dst, const char *src, size_t n, const char *next) {
#if defined(__x86_64__)
    if (n >= STREAM_MIN) {
        size_t head = (size_t)(-(uintptr_t)dst) & 63;
        memcpy(dst, src, head);
        size_t done = head + stream_lines(dst + head, src + head, n - head, next);
        dst += done; src += done; n -= done;
        _mm_sfence();
    }
#endif
    copy_plain(dst, src, n);
}

typedef struct {
    char *dst;
    const char *src;
    size_t nbytes;
} Piece;

static void copy_all(const Piece *pieces, Py_ssize_t count, int stream) {
    size_t since = 0;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < count; at++) {
        const char *next = at + 1 < count ? pieces[at + 1].src : NULL;
        take_turns_after(pieces[at].nbytes % STEP, &since);
        if (stream) copy_stream(pieces[at].dst, pieces[at].src, pieces[at].nbytes, next);
        else copy_plain(pieces[at].dst, pieces[at].src, pieces[at].nbytes);
    }
    Py_END_ALLOW_THREADS
}

/* copy_runs(runs, base, into, stream): see _native.pyi. */
static PyObject *copy_runs(PyObject *self, PyObject *args) {
    PyObject *runs;
    long long base;
    int into, stream;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!Lpp", &PyList_Type, &runs, &base, &into, &stream)) return NULL;
    Py_ssize_t count = PyList_GET_SIZE(runs);
    Piece *pieces = PyMem_New(Piece, (size_t)count + 1);
    if (pieces == NULL) return PyErr_NoMemory();
    for (Py_ssize_t at = 0; at < count; at++) {
        PyObject *run = PyList_GET_ITEM(runs, at);
        int64_t numbers[3] = {0, 0, 0};
        if (!PyTuple_Check(run) || PyTuple_GET_SIZE(run) != 3)
            PyErr_SetString(PyExc_TypeError, "a run is a tuple of three numbers");
        for (int i = 0; i < 3 && !PyErr_Occurred(); i++)
            numbers[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(run, i));
        if (PyErr_Occurred()) {
            PyMem_Free(pieces);
            return NULL;
        }
        char *here = (char *)(uintptr_t)numbers[0], *there = (char *)(uintptr_t)(base + numbers[1]);
        pieces[at].dst = into ? there : here;
        pieces[at].src = into ? here : there;
        pieces[at].nbytes = (size_t)numbers[2];
    }
    copy_all(pieces, count, stream);
    PyMem_Free(pieces);
    Py_RETURN_NONE;
}

/* copy_columns(addresses, offsets, sizes, base, into, stream): see _native.pyi. */
static PyObject *copy_columns(PyObject *self, PyObject *args) {
    PyObject *columns[3];
    long long base;
    int into, stream;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O!O!Lpp", &PyList_Type, &columns[0], &PyList_Type, &columns[1],
                          &PyList_Type, &columns[2], &base, &into, &stream))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(columns[0]);
    if (PyList_GET_SIZE(columns[1]) != count || PyList_GET_SIZE(columns[2]) != count) {
        PyErr_SetString(PyExc_ValueError, "the columns have different lengths");
        return NULL;
    }
    Piece *pieces = PyMem_New(Piece, (size_t)count + 1);
    if (pieces == NULL) return PyErr_NoMemory();
    for (Py_ssize_t at = 0; at < count; at++) {
        long long numbers[3];
        for (int i = 0; i < 3; i++) {
            numbers[i] = PyLong_AsLongLong(PyList_GET_ITEM(columns[i], at));
            if (numbers[i] == -1 && PyErr_Occurred()) {
                PyMem_Free(pieces);
                return NULL;
            }
        }
        char *here = (char *)(uintptr_t)numbers[0], *there = (char *)(uintptr_t)(base + numbers[1]);
        pieces[at].dst = into ? there : here;
        pieces[at].src = into ? here : there;
        pieces[at].nbytes = (size_t)numbers[2];
    }
    copy_all(pieces, count, stream);
    PyMem_Free(pieces);
    Py_RETURN_NONE;
}

#if defined(__x86_64__)
#define TOGETHER 8

/* Copies up to TOGETHER rows, a cache line of each in turn, and meanwhile prefetches the same line
 * of as many further rows (the hardware does not, as each row begins on a new page). Rows may be
 * aligned differently: the bytes before and after the whole lines of each are copied by memcpy. */
static void stream_rows(char *dst, const char *src, size_t n, int rows, ptrdiff_t dst_step,
                        ptrdiff_t src_step) {
    char *to[TOGETHER];
    const char *from[TOGETHER];
    size_t lines = n;
    for (int row = 0; row < rows; row++) {
        char *start = dst + row * dst_step;
        size_t head = (size_t)(-(uintptr_t)start) & 63;
        memcpy(start, src + row * src_step, head);
        to[row] = start + head;
        from[row] = src + row * src_step + head;
        if (((n - head) & ~(size_t)63) < lines) lines = (n - head) & ~(size_t)63;
    }
    for (size_t at = 0; at < lines; at += 64) {
        for (int row = 0; row < rows; row++) {
            _mm_prefetch(from[row] + at + rows * src_step, _MM_HINT_T0);
            stream_line(to[row] + at, from[row] + at);
        }
    }
    for (int row = 0; row < rows; row++) {
        size_t done = (size_t)(to[row] - (dst + row * dst_step)) + lines;
        memcpy(to[row] + lines, from[row] + lines, n - done);
    }
}
#endif

#if defined(__x86_64__)
/* Copies one row after the other. */
static void stream_each(char *dst, const char *src, size_t n, size_t rows, ptrdiff_t dst_step,
                        ptrdiff_t src_step, size_t *since) {
    for (; rows > 0; rows--, dst += dst_step, src += src_step) {
        size_t head = (size_t)(-(uintptr_t)dst) & 63;
        memcpy(dst, src, head);
        size_t done = head + stream_lines(dst + head, src + head, n - head, src + src_step);
        memcpy(dst + done, src + done, n - done);
        take_turns_after(n % STEP, since);
    }
}

/* Whether to the processor, which compares the last twelve bits of addresses first, a load from
 * ``src`` or soon after it looks like one of what was just stored to ``dst``: then it waits for the
 * store, which takes long for one that bypasses the cache. */
static int look_same(const char *dst, const char *src) {
    return (((uintptr_t)dst - (uintptr_t)src + 63) & 4095) < 512;
}

/* Whether in many of the pairs of TOGETHER rows, the lines of the one look like those of the other. */
static int rows_look_same(const char *dst, const char *src, ptrdiff_t dst_step, ptrdiff_t src_step) {
    int same = 0;
    for (int to = 0; to < TOGETHER; to++)
        for (int from = 0; from < TOGETHER; from++)
            same += look_same(dst + to * dst_step, src + from * src_step);
    return same > TOGETHER;
}
#endif

static void copy_grid(char *dst, const char *src, size_t n, size_t rows,
                      ptrdiff_t dst_step, ptrdiff_t src_step, int stream, size_t *since) {
#if defined(__x86_64__)
    if (stream && n >= 256) {
        /* Taking turns pays where rows are shorter than what is prefetched. */
        if (n >= AHEAD || rows_look_same(dst, src, dst_step, src_step)) {
            stream_each(dst, src, n, rows, dst_step, src_step, since);
            rows = 0;
        }
        while (rows > 0) {
            int some = rows < TOGETHER ? (int)rows : TOGETHER;
            stream_rows(dst, src, n, some, dst_step, src_step);
            take_turns_after((size_t)some * n, since);
            dst += some * dst_step; src += some * src_step; rows -= (size_t)some;
        }
        _mm_sfence();
        return;
    }
#endif
    for (; rows > 0; rows--, dst += dst_step, src += src_step) {
        copy_plain(dst, src, n);
        take_turns_after(n % STEP, since);
    }
}

/* copy_rows(grids, stream): an int64 buffer of (dst, src, nbytes, rows, dst step, src step). */
static PyObject *copy_rows(PyObject *self, PyObject *args) {
    Py_buffer view;
    int stream;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*p", &view, &stream)) return NULL;
    if (view.len % (6 * (Py_ssize_t)sizeof(int64_t)) != 0) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "grids: length is not a multiple of 48 bytes");
        return NULL;
    }
    size_t since = 0;
    Py_BEGIN_ALLOW_THREADS
    const int64_t *grid = (const int64_t *)view.buf;
    for (Py_ssize_t i = view.len / (Py_ssize_t)(6 * sizeof(int64_t)); i > 0; i--, grid += 6)
        copy_grid((char *)(uintptr_t)grid[0], (const char *)(uintptr_t)grid[1], (size_t)grid[2],
                  (size_t)grid[3], (ptrdiff_t)grid[4], (ptrdiff_t)grid[5], stream, &since);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

/* transfer(fd, rows, sending, more): in transfer.c. */
extern PyObject *torchstore_transfer(PyObject *self, PyObject *args);

/* copy_strided(array): in strided.c. */
extern PyObject *torchstore_copy_strided(PyObject *self, PyObject *buffer);

/* hash_runs(runs): in hashing.c. */
extern PyObject *torchstore_hash_runs(PyObject *self, PyObject *list);

/* guard(address, nbytes), is_lost(guard), unguard(guard, owner): in guarding.c. */
extern PyObject *torchstore_guard(PyObject *self, PyObject *args);
extern PyObject *torchstore_is_lost(PyObject *self, PyObject *number);
extern PyObject *torchstore_unguard(PyObject *self, PyObject *args);

/* The part of DLPack 1.x for inspecting tensors without torch's headers; see dlpack.h. */
typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *previous;
    void *allocate, *from_object, *to_object;
    int (*look)(void *object, DLTensor *out);
    void *stream;
} ExchangeAPI;

#define DLPACK_INT 0
#define DLPACK_FLOAT 2
#define DLPACK_BFLOAT 4
#define DLPACK_COMPLEX 5
#define MAX_DIMS 64
/* No memory of a process lies below this: torch's zero tensors have no storage. */
#define LOWEST_ADDRESS 4096

/* Methods of torch that are also called for every tensor: unbound, without arguments. */
typedef struct {
    PyObject *is_neg, *storage_offset, *untyped_storage, *storage_nbytes;
} Methods;

/* The string "dtype"; made once, because looking up a new one would take longer than the rest. */
static PyObject *dtype_attribute;

/* What is in torch's capsule; NULL with an exception if it is of another version of DLPack. */
static const ExchangeAPI *exchange_api(PyObject *capsule) {
    const ExchangeAPI *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (api == NULL || (api->major == 1 && api->look != NULL)) return api;
    PyErr_SetString(PyExc_ValueError, "api: another version of DLPack");
    return NULL;
}

/* The number that a method without arguments returns, or -1 if it raises: all the numbers that are
 * queried here are at least 0. */
static int64_t number_of(PyObject *method, PyObject *object) {
    PyObject *found = PyObject_CallOneArg(method, object);
    if (found == NULL) return -1;
    int64_t number = PyLong_AsLongLong(found);
    Py_DECREF(found);
    return number;
}

/* The bytes of a tensor that is contiguous and lies in the ``there`` bytes of its storage, at
 * ``offset`` (in elements); 0 if it is not, or is empty. */
static int64_t contiguous_bytes(const DLTensor *seen, int64_t there, int64_t offset) {
    int64_t itemsize = seen->dtype.bits / 8;
    int64_t numel = 1;
    for (int dim = seen->ndim - 1; dim >= 0; dim--) {
        int64_t extent = seen->shape[dim];
        if (extent != 1 && seen->strides[dim] != numel) return 0;
        /* The number of elements in the storage fits into an int64, and so does any product of
         * fewer extents. If a product is too large for the storage, the tensor is not plain. */
        if (extent != 0 && numel > there / itemsize / extent) return 0;
        numel *= extent;
    }
    if (numel == 0 || offset > there / itemsize - numel) return 0;
    if ((uintptr_t)seen->data < LOWEST_ADDRESS + (uintptr_t)(offset * itemsize)) return 0;
    return numel * itemsize;
}

/* A new reference to the storage of a tensor, its size in bytes, and where in it the tensor begins,
 * in elements; NULL with an exception if torch cannot tell. */
static PyObject *storage_of(const Methods *methods, PyObject *tensor, int64_t *there,
                            int64_t *offset) {
    PyObject *storage = PyObject_CallOneArg(methods->untyped_storage, tensor);
    if (storage == NULL) return NULL;
    *there = number_of(methods->storage_nbytes, storage);
    if (*there >= 0 && (*offset = number_of(methods->storage_offset, tensor)) >= 0) return storage;
    Py_DECREF(storage);
    return NULL;
}

/* Returns the size in bytes of a tensor if it is plain (see ``values.plain``), and fills in its
 * DLTensor; 0 if it is not plain; -1 with an exception if torch cannot describe it. Calls that may
 * release the GIL come first. ``storage`` becomes a new reference to the tensor's storage, or NULL;
 * if it is itself NULL, it is not checked that the storage still holds the bytes. ``dtype`` becomes
 * a number that identifies its dtype. ``device`` is the type of its device in DLPack. */
static int64_t plain_bytes(const ExchangeAPI *api, const Methods *methods, PyObject *tensor,
                           int device, DLTensor *seen, PyObject **storage, int64_t *dtype) {
    int64_t negative = number_of(methods->is_neg, tensor);
    if (negative != 0) return negative < 0 ? -1 : 0;
    int64_t there = INT64_MAX, offset = 0;
    if (storage != NULL) {
        *storage = storage_of(methods, tensor, &there, &offset);
        if (*storage == NULL) return -1;
    }
    if (api->look(tensor, seen) != 0) return -1;
    int code = seen->dtype.code;
    if (seen->dtype.bits >= 16 &&
        (code == DLPACK_INT || code == DLPACK_FLOAT || code == DLPACK_BFLOAT)) {
        *dtype = code * 256 + seen->dtype.bits; /* less than any address */
    } else {
        /* It must come from torch: in DLPack, int1 to int7 are int8, and others may be alike. */
        PyObject *own = PyObject_GetAttr(tensor, dtype_attribute);
        if (own == NULL) return -1;
        *dtype = (int64_t)(intptr_t)own; /* there is one immortal object per dtype */
        Py_DECREF(own);
    }
    if (seen->device_type != device || seen->dtype.code == DLPACK_COMPLEX ||
        seen->dtype.lanes != 1 || seen->dtype.bits % 8 != 0 || seen->ndim > MAX_DIMS)
        return 0;
    return contiguous_bytes(seen, there, offset);
}

/* look(api, types, methods, describe, known, values, memory, device): see _native.pyi. */
static PyObject *look(PyObject *self, PyObject *args) {
    PyObject *capsule, *plain, *parameter, *describe, *known, *values;
    Methods methods;
    int memory, device;
    (void)self;
    if (!PyArg_ParseTuple(args, "O(OO)(OOOO)OO!O!pi", &capsule, &plain, &parameter, &methods.is_neg,
                          &methods.storage_offset, &methods.untyped_storage,
                          &methods.storage_nbytes, &describe, &PyDict_Type, &known, &PyList_Type,
                          &values, &memory, &device))
        return NULL;
    const ExchangeAPI *api = exchange_api(capsule);
    if (api == NULL) return NULL;
    Py_ssize_t count = PyList_GET_SIZE(values);
    PyObject *metas = PyList_New(count), *sizes = PyList_New(count), *places = PyList_New(count);
    PyObject *storages = PyList_New(memory ? count : 0);
    /* The dtype and shape of the last plain tensor, and its description. */
    struct {
        int64_t dtype, extents[MAX_DIMS];
    } kind;
    size_t kind_size = 0;
    PyObject *meta = NULL, *size = NULL;
    int64_t nbytes = 0;
    if (metas == NULL || sizes == NULL || places == NULL || storages == NULL) goto failed;
    for (Py_ssize_t at = 0; at < count; at++) {
        PyObject *value = PyList_GET_ITEM(values, at); /* the list belongs to the caller */
        DLTensor seen;
        PyObject *storage = NULL;
        int64_t found = 0, dtype = 0;
        if (Py_TYPE(value) == (PyTypeObject *)plain ||
            Py_TYPE(value) == (PyTypeObject *)parameter) {
            found = plain_bytes(api, &methods, value, device, &seen, memory ? &storage : NULL,
                                &dtype);
            if (found < 0) {
                if (!PyErr_ExceptionMatches(PyExc_Exception)) {
                    Py_XDECREF(storage);
                    goto failed;
                }
                PyErr_Clear();
                found = 0;
            }
        }
        if (found == 0) {
            Py_XDECREF(storage);
            PyList_SET_ITEM(metas, at, Py_NewRef(Py_None));
            PyList_SET_ITEM(sizes, at, PyLong_FromLong(0)); /* small ints are preallocated */
            PyList_SET_ITEM(places, at, PyLong_FromLong(0));
            if (memory) PyList_SET_ITEM(storages, at, Py_NewRef(Py_None));
            continue;
        }
        if (memory) PyList_SET_ITEM(storages, at, storage);
        PyObject *place = PyLong_FromLongLong((int64_t)(uintptr_t)seen.data);
        if (place == NULL) goto failed;
        PyList_SET_ITEM(places, at, place);
        size_t extents = (size_t)seen.ndim * sizeof(int64_t);
        if (meta == NULL || kind_size != extents || kind.dtype != dtype ||
            memcmp(kind.extents, seen.shape, extents) != 0) {
            kind.dtype = dtype;
            kind_size = extents;
            memcpy(kind.extents, seen.shape, extents);
            PyObject *key = PyBytes_FromStringAndSize((char *)&kind,
                                                      (Py_ssize_t)(sizeof(int64_t) + extents));
            if (key == NULL) goto failed;
            Py_XSETREF(meta, Py_XNewRef(PyDict_GetItemWithError(known, key)));
            if (meta == NULL && !PyErr_Occurred()) {
                meta = PyObject_CallOneArg(describe, value);
                if (meta != NULL && PyDict_SetItem(known, key, meta) != 0) Py_CLEAR(meta);
            }
            Py_DECREF(key);
            if (meta == NULL) goto failed;
        }
        if (size == NULL || nbytes != found) {
            nbytes = found;
            Py_XSETREF(size, PyLong_FromLongLong(found));
            if (size == NULL) goto failed;
        }
        PyList_SET_ITEM(metas, at, Py_NewRef(meta));
        PyList_SET_ITEM(sizes, at, Py_NewRef(size));
    }
    Py_XDECREF(meta);
    Py_XDECREF(size);
    return Py_BuildValue("NNNN", metas, sizes, places, storages);
failed:
    Py_XDECREF(metas);
    Py_XDECREF(sizes);
    Py_XDECREF(places);
    Py_XDECREF(storages);
    Py_XDECREF(meta);
    Py_XDECREF(size);
    return NULL;
}

/* still(api, methods, values, addresses, sizes, device): see _native.pyi. */
static PyObject *still(PyObject *self, PyObject *args) {
    PyObject *capsule, *values, *addresses, *sizes;
    Methods methods;
    int device;
    (void)self;
    if (!PyArg_ParseTuple(args, "O(OOOO)O!O!O!i", &capsule, &methods.is_neg,
                          &methods.storage_offset, &methods.untyped_storage,
                          &methods.storage_nbytes, &PyList_Type, &values, &PyList_Type,
                          &addresses, &PyList_Type, &sizes, &device))
        return NULL;
    const ExchangeAPI *api = exchange_api(capsule);
    if (api == NULL) return NULL;
    Py_ssize_t count = PyList_GET_SIZE(values);
    if (PyList_GET_SIZE(addresses) != count || PyList_GET_SIZE(sizes) != count) {
        PyErr_SetString(PyExc_ValueError, "values, addresses and sizes differ in length");
        return NULL;
    }
    PyObject *storages = PyList_New(count);
    for (Py_ssize_t at = 0; storages != NULL && at < count; at++) {
        PyObject *value = PyList_GET_ITEM(values, at); /* the lists belong to the caller */
        int64_t there, offset;
        DLTensor seen;
        PyObject *storage = storage_of(&methods, value, &there, &offset);
        if (storage == NULL || api->look(value, &seen) != 0) {
            Py_XDECREF(storage);
            if (!PyErr_ExceptionMatches(PyExc_Exception)) goto failed;
            PyErr_Clear();
            goto changed;
        }
        PyList_SET_ITEM(storages, at, storage);
        int64_t address = PyLong_AsLongLong(PyList_GET_ITEM(addresses, at));
        int64_t nbytes = PyLong_AsLongLong(PyList_GET_ITEM(sizes, at));
        if (PyErr_Occurred()) goto failed;
        if (nbytes <= 0 || (int64_t)(uintptr_t)seen.data != address ||
            seen.device_type != device || seen.dtype.lanes != 1 ||
            seen.dtype.bits < 8 || seen.ndim > MAX_DIMS ||
            contiguous_bytes(&seen, there, offset) != nbytes)
            goto changed;
    }
    return storages;
changed:
    Py_DECREF(storages);
    Py_RETURN_NONE;
failed:
    Py_DECREF(storages);
    return NULL;
}

/* A 64-bit checksum. Eight independent accumulators, so that the compiler can use vectors: each adds
 * the product of the halves of a word that was combined with a key, and the word of its neighbour, as
 * XXH3 does. The accumulators are scrambled after every 1,024 bytes, so that the place of a word
 * counts. */
#define SUM_LANES 8
#define SUM_STRIPES 16
#define SUM_STRIPE (SUM_LANES * sizeof(uint64_t))
#define SUM_TURN 0xc2b2ae3d27d4eb4fULL

static const uint64_t sum_keys[SUM_LANES] = {
    0xbe4ba423396cfeb8ULL, 0x1cad21f72c81017cULL, 0xdb979083e96dd4deULL, 0x1f67b3b7a4a44072ULL,
    0x78e5c0cc4ee679cbULL, 0x2172ffcc7dd05a82ULL, 0x8e2443f7744608b8ULL, 0x4c263a81e69035e0ULL};

static inline __attribute__((always_inline)) void sum_stripe(uint64_t *acc, const char *from, uint64_t turn) {
    uint64_t words[SUM_LANES];
    memcpy(words, from, sizeof words);
    for (int lane = 0; lane < SUM_LANES; lane++) {
        uint64_t mixed = words[lane] ^ (sum_keys[lane] + turn);
        acc[lane] += (mixed & 0xffffffffULL) * (mixed >> 32);
    }
    for (int lane = 0; lane < SUM_LANES; lane++)
        acc[lane] += words[lane ^ 1];
}

static void sum_scramble(uint64_t *acc) {
    for (int lane = 0; lane < SUM_LANES; lane++)
        acc[lane] = (acc[lane] ^ (acc[lane] >> 47) ^ sum_keys[lane]) * 0x9e3779b1ULL;
}

#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("O3")))
#endif
static void sum_block(uint64_t *acc, const char *from, size_t stripes) {
    for (uint64_t turn = 0; turn < stripes; turn++, from += SUM_STRIPE)
        sum_stripe(acc, from, turn * SUM_TURN);
    sum_scramble(acc);
}

#if defined(__x86_64__)
/* The same for whole blocks, with four lanes in a register. ``alone``: see prefetching.h. */
AVX2 static inline __attribute__((always_inline)) size_t sum_wide(uint64_t *acc, const char *from,
                                                                  size_t nbytes, int alone) {
    const __m256i *keys = (const __m256i *)sum_keys;
    const __m256i prime = _mm256_set1_epi64x(0x9e3779b1), step = _mm256_set1_epi64x((int64_t)SUM_TURN);
    __m256i sums[2], first[2];
    size_t done = 0;
    for (int half = 0; half < 2; half++) {
        sums[half] = _mm256_loadu_si256((const __m256i *)acc + half);
        first[half] = _mm256_loadu_si256(keys + half);
    }
    while (nbytes - done >= SUM_STRIPES * SUM_STRIPE) {
        __m256i turned[2] = {first[0], first[1]};
        for (int turn = 0; turn < SUM_STRIPES; turn++, done += SUM_STRIPE) {
            prefetch_once(from + done + AHEAD, alone);
            for (int half = 0; half < 2; half++) {
                __m256i words = _mm256_loadu_si256((const __m256i *)(from + done) + half);
                __m256i mixed = _mm256_xor_si256(words, turned[half]);
                __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
                __m256i swapped = _mm256_shuffle_epi32(words, 0x4e);
                sums[half] = _mm256_add_epi64(sums[half], _mm256_add_epi64(product, swapped));
                turned[half] = _mm256_add_epi64(turned[half], step);
            }
        }
        for (int half = 0; half < 2; half++) {
            __m256i mixed = _mm256_xor_si256(sums[half], _mm256_srli_epi64(sums[half], 47));
            mixed = _mm256_xor_si256(mixed, first[half]);
            __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
            sums[half] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
        }
    }
    for (int half = 0; half < 2; half++)
        _mm256_storeu_si256((__m256i *)acc + half, sums[half]);
    return done;
}

AVX2 static size_t sum_blocks_avx2(uint64_t *acc, const char *from, size_t nbytes) {
    return prefetches_alone() ? sum_wide(acc, from, nbytes, 1) : sum_wide(acc, from, nbytes, 0);
}
#endif

static uint64_t sum_bytes(const char *from, size_t nbytes) {
    uint64_t acc[SUM_LANES], total = nbytes * 0x9e3779b185ebca87ULL;
    char last[SUM_STRIPE] = {0};
    size_t left = nbytes, since = 0;
    memcpy(acc, sum_keys, sizeof acc);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        size_t done;
        do {
            done = sum_blocks_avx2(acc, from, left < STEP ? left : STEP);
            from += done; left -= done;
            torchstore_take_turns();
        } while (done == STEP);
    }
#endif
    while (left >= SUM_STRIPE) {
        size_t stripes = left / SUM_STRIPE < SUM_STRIPES ? left / SUM_STRIPE : SUM_STRIPES;
        sum_block(acc, from, stripes);
        take_turns_after(stripes * SUM_STRIPE, &since);
        from += stripes * SUM_STRIPE;
        left -= stripes * SUM_STRIPE;
    }
    memcpy(last, from, left);
    sum_stripe(acc, last, 1);
    sum_scramble(acc);
    for (int lane = 0; lane < SUM_LANES; lane++) {
        total ^= acc[lane];
        total = (total ^ (total >> 29)) * 0xbf58476d1ce4e5b9ULL;
        total ^= total >> 32;
    }
    return total;
}

static PyObject *checksum(PyObject *self, PyObject *data) {
    Py_buffer view;
    uint64_t found;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    found = sum_bytes(view.buf, (size_t)view.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLongLong(found);
}

/* Of a log (see ``server/keeping/log.py``): the word that says where it ends, and of a record the
 * bytes before its body: how many that has, its kind, its session, and when it was written. */
#define LOG_END 8
#define LOG_RECORD 18

/* append_record(memory, kind, session, at, body): see _native.pyi. */
static PyObject *append_record(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Py_buffer memory, body;
    (void)self;
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "append_record takes five arguments");
        return NULL;
    }
    unsigned long kind = PyLong_AsUnsignedLong(args[1]);
    if (kind == (unsigned long)-1 && PyErr_Occurred()) return NULL;
    unsigned long session = PyLong_AsUnsignedLong(args[2]);
    if (session == (unsigned long)-1 && PyErr_Occurred()) return NULL;
    double at = PyFloat_AsDouble(args[3]);
    if (at == -1.0 && PyErr_Occurred()) return NULL;
    if (kind > UINT16_MAX || session > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "the kind or the session of a record is too large");
        return NULL;
    }
    if (PyObject_GetBuffer(args[0], &memory, PyBUF_WRITABLE) < 0) return NULL;
    if (PyObject_GetBuffer(args[4], &body, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&memory);
        return NULL;
    }
    char *log = memory.buf;
    int64_t start = -1, end = -1, size = memory.len, nbytes = body.len;
    if (size >= 2 * LOG_END) start = __atomic_load_n((int64_t *)(log + LOG_END), __ATOMIC_RELAXED);
    if (start < 2 * LOG_END || start > size || nbytes > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "this is no log, or the record is too large");
    } else if (size - start >= LOG_RECORD + nbytes + LOG_END) {
        uint32_t length = (uint32_t)nbytes, serial = (uint32_t)session;
        uint16_t what = (uint16_t)kind;
        char *to = log + start;
        memcpy(to, &length, 4);
        memcpy(to + 4, &what, 2);
        memcpy(to + 6, &serial, 4);
        memcpy(to + 10, &at, 8);
        memcpy(to + LOG_RECORD, body.buf, (size_t)nbytes);
        end = (start + LOG_RECORD + nbytes + 7) & ~(int64_t)7;
        /* Whoever sees the new end also sees the record. */
        __atomic_store_n((int64_t *)(log + LOG_END), end, __ATOMIC_RELEASE);
    }
    PyBuffer_Release(&body);
    PyBuffer_Release(&memory);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(end);
}

static PyMethodDef methods[] = {
    {"append_record", (PyCFunction)(void (*)(void))append_record, METH_FASTCALL,
     "append_record(memory, kind, session, at, body)\n\nAppend a record to a log; where it ends now, or -1 "
     "if it is full."},
    {"checksum", checksum, METH_O, "checksum(data)\n\nA 64-bit checksum of a buffer, GIL released."},
    {"copy_runs", copy_runs, METH_VARARGS,
     "copy_runs(runs, base, into, stream)\n\nCopy each (address, offset, nbytes), GIL released."},
    {"copy_columns", copy_columns, METH_VARARGS,
     "copy_columns(addresses, offsets, sizes, base, into, stream)\n\nCopy many runs, GIL released."},
    {"copy_rows", copy_rows, METH_VARARGS,
     "copy_rows(grids, stream)\n\nCopy each (dst, src, nbytes, rows, dst step, src step) of an int64\n"
     "buffer, row by row, GIL released."},
    {"copy_strided", torchstore_copy_strided, METH_O,
     "copy_strided(array)\n\nCopy a strided array into another, GIL released: an int64 buffer of dst, src, itemsize,\n"
     "and (extent, dst step, src step) for each dimension, steps in bytes."},
    {"hash_runs", torchstore_hash_runs, METH_O,
     "hash_runs(runs)\n\nThe XXH3 (128 bits) of each (destination or 0, source, nbytes), which is copied on the\n"
     "way, GIL released; None if the processor has no AVX2."},
    {"guard", torchstore_guard, METH_VARARGS,
     "guard(address, nbytes)\n\nReplace by zeros what cannot be read any more of a range of mapped files."},
    {"is_lost", torchstore_is_lost, METH_O,
     "is_lost(guard)\n\nWhether something in a guarded range was replaced."},
    {"unguard", torchstore_unguard, METH_VARARGS,
     "unguard(guard, owner)\n\nEnd a guard, whose owner, if that is given, dies."},
    {"transfer", torchstore_transfer, METH_VARARGS,
     "transfer(fd, rows, sending, more)\n\nSend or receive each (address, nbytes, rows, stride) of an "
     "int64\nbuffer, GIL released; the number of bytes."},
    {"look", look, METH_VARARGS,
     "look(api, types, methods, describe, known, values, memory, device)\n\nWhat each value is, how many bytes it has, and "
     "where they lie, if it is a plain tensor."},
    {"still", still, METH_VARARGS,
     "still(api, methods, values, addresses, sizes, device)\n\nThe storages of plain tensors that look() has seen, or None "
     "if the bytes of\none are not where they were any more."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "torchstore_core._native",
                                    "Copies and looks.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    dtype_attribute = PyUnicode_InternFromString("dtype");
    return dtype_attribute == NULL ? NULL : PyModule_Create(&module);
}
