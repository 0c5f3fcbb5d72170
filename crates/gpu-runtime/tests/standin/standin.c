// A stand-in for the libraries of CUDA, or with -DROCM of ROCm: "device memory" is the host's,
// captured work is a list that a replay runs, and each function can be told to fail once.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef ROCM
#define NAME(cuda, hip) hip
#else
#define NAME(cuda, hip) cuda
#endif
#define TEXT(name) #name
#define STRING(name) TEXT(name)

enum { OK = 0, INVALID = 1, NO_ROOM = 2, NO_CONTEXT = 201, INVALIDATED = 901, UNSUPPORTED = 900 };

static size_t CAPACITY = 1 << 20;
static size_t used;
static int live, n_devices = 2;
static char fail_name[64], log_text[1 << 20];
static int fail_code;
static _Thread_local int is_current;

// What the tests ask and tell.
void standin_fail(const char *name, int code) {
    snprintf(fail_name, sizeof fail_name, "%s", name);
    fail_code = code;
}
void standin_room(size_t n) { CAPACITY = n; }
void standin_devices(int n) { n_devices = n; }
int standin_live(void) { return live; }
const char *standin_log(void) { return log_text; }

static int entered(const char *name) {
    size_t len = strlen(log_text);
    snprintf(log_text + len, sizeof log_text - len, "%s ", name);
    if (strcmp(name, fail_name)) return OK;
    fail_name[0] = 0;
    return fail_code;
}

// A function under its name of either vendor, which notes its call and can be told to fail.
#define FREE_FN(cuda, hip, params, ...)                      \
    int NAME(cuda, hip) params {                             \
        int scripted = entered(STRING(NAME(cuda, hip)));     \
        if (scripted) return scripted;                       \
        __VA_ARGS__ return OK;                               \
    }
// One that needs a current context.
#define FN(cuda, hip, params, ...) \
    FREE_FN(cuda, hip, params, { if (!is_current) return NO_CONTEXT; } __VA_ARGS__)

typedef struct { int kind; uint64_t to, from; size_t n; int value; } Op;
enum { COPY, FILL, ADD_ONE };
typedef struct { int n; Op ops[64]; } Graph;
typedef struct { int capturing, broken; Graph graph; } Stream;
static Stream zero;
static _Thread_local Stream *capturing;

static void run(Op *op) {
    if (op->kind == COPY) memmove((void *)op->to, (void *)op->from, op->n);
    if (op->kind == FILL) memset((void *)op->to, op->value, op->n);
    if (op->kind == ADD_ONE)
        for (size_t i = 0; i < op->n; i++) ((float *)op->to)[i] += 1.0f;
}
static int queue(Stream *s, Op op) {
    if (!s) s = &zero;
    if (s->capturing) s->graph.ops[s->graph.n++] = op;
    else run(&op);
    return OK;
}
// What a capturing thread must not do, and what breaks its capture.
#define NOT_CAPTURING { if (capturing) { capturing->broken = 1; return UNSUPPORTED; } }

FREE_FN(cuInit, hipInit, (unsigned flags), { if (flags) return INVALID; if (!n_devices) return 100; })
int NAME(cuGetErrorString, hipDrvGetErrorString)(int code, const char **text) {
    *text = code == INVALID ? "stand-in: invalid value" : code == NO_ROOM ? "stand-in: no room"
          : code == INVALIDATED ? "stand-in: capture broken" : code == 700 ? "stand-in: bad address" : 0;
    return *text ? OK : INVALID;
}
FREE_FN(cuDriverGetVersion, hipDriverGetVersion, (int *v), { *v = 13000; })
FREE_FN(cuDeviceGetCount, hipGetDeviceCount, (int *n), { *n = n_devices; })
FREE_FN(cuDeviceGet, hipDeviceGet, (int *d, int n), { *d = n; })
FREE_FN(cuDeviceGetName, hipDeviceGetName, (char *name, int len, int d),
    { snprintf(name, len, "Stand-in %d", d); })
FREE_FN(cuDeviceTotalMem_v2, hipDeviceTotalMem, (size_t *n, int d), { (void)d; *n = CAPACITY; })
#ifdef ROCM
static const int attributes[][2] = {{87, 64}, {63, 304}, {19, 4 << 20}, {74, 65536}};
#else
static const int attributes[][2] = {{10, 32}, {16, 132}, {38, 50 << 20}, {97, 232448}, {75, 9}, {76, 0}};
#endif
FREE_FN(cuDeviceGetAttribute, hipDeviceGetAttribute, (int *v, int attribute, int d), {
    (void)d;
    *v = -1;
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
        if (attributes[i][0] == attribute) *v = attributes[i][1];
})
#ifdef ROCM
FREE_FN(, hipSetDevice, (int d), { is_current = 1 + d; })
FREE_FN(, hipGetDevicePropertiesR0600, (char *p, int d), {
    memset(p, 0, 1472);
    snprintf(p, 256, "Stand-in %d", d);
    strcpy(p + 1160, "gfx942:sramecc+:xnack-");
})
#else
FREE_FN(cuDevicePrimaryCtxRetain, , (void **c, int d), { *c = (void *)(intptr_t)(1 + d); live++; })
FREE_FN(cuDevicePrimaryCtxRelease_v2, , (int d), { (void)d; live--; })
FREE_FN(cuCtxSetCurrent, , (void *c), { is_current = (int)(intptr_t)c; })
FN(cuFuncSetAttribute, , (void *f, int attribute, int v), {
    if (f != (void *)ADD_ONE || attribute != 8 || v <= 0) return INVALID;
})
#endif
FN(cuCtxSynchronize, hipDeviceSynchronize, (void), { NOT_CAPTURING })
FN(cuMemGetInfo_v2, hipMemGetInfo, (size_t *f, size_t *t), { *f = CAPACITY - used; *t = CAPACITY; })

static int allocate(void **at, size_t n) {
    if (n > CAPACITY - used) return NO_ROOM;
    size_t *block = aligned_alloc(256, (n + 511) / 256 * 256);
    block[0] = n;
    used += n;
    live++;
    *at = (char *)block + 256;
    memset(*at, 0xee, n);
    return OK;
}
static int release(void *at) {
    size_t *block = (size_t *)((char *)at - 256);
    used -= block[0];
    memset(at, 0xdd, block[0]);
    free(block);
    live--;
    return OK;
}
FN(cuMemAlloc_v2, hipMalloc, (void **at, size_t n), { NOT_CAPTURING if (!n) return INVALID; return allocate(at, n); })
FN(cuMemFree_v2, hipFree, (void *at), { NOT_CAPTURING return release(at); })
FN(cuMemHostAlloc, hipHostMalloc, (void **at, size_t n, unsigned flags), { if (flags) return INVALID; return allocate(at, n); })
FN(cuMemFreeHost, hipHostFree, (void *at), { return release(at); })
FN(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync, (uint64_t to, const void *from, size_t n, Stream *s),
    { return queue(s, (Op){COPY, to, (uint64_t)from, n, 0}); })
FN(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync, (void *to, uint64_t from, size_t n, Stream *s),
    { return queue(s, (Op){COPY, (uint64_t)to, from, n, 0}); })
FN(cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync, (uint64_t to, uint64_t from, size_t n, Stream *s),
    { return queue(s, (Op){COPY, to, from, n, 0}); })
FN(cuMemsetD8Async, hipMemsetD8Async, (uint64_t to, unsigned char v, size_t n, Stream *s),
    { return queue(s, (Op){FILL, to, 0, n, v}); })

FN(cuStreamCreate, hipStreamCreateWithFlags, (Stream **s, unsigned flags),
    { if (flags != 1) return INVALID; *s = calloc(1, sizeof **s); live++; })
FN(cuStreamDestroy_v2, hipStreamDestroy, (Stream *s), { free(s); live--; })
FN(cuStreamSynchronize, hipStreamSynchronize, (Stream *s), { (void)s; NOT_CAPTURING })
FN(cuStreamWaitEvent, hipStreamWaitEvent, (Stream *s, void *e, unsigned f), { (void)s; (void)e; (void)f; })
FN(cuStreamBeginCapture_v2, hipStreamBeginCapture, (Stream *s, int mode), {
    if (s->capturing || mode != 1) return INVALID;
    memset(s, 0, sizeof *s);
    s->capturing = 1;
    capturing = s;
})
FN(cuStreamEndCapture, hipStreamEndCapture, (Stream *s, Graph **g), {
    if (!s->capturing) return INVALID;
    s->capturing = 0;
    capturing = 0;
    if (s->broken) return INVALIDATED;
    *g = malloc(sizeof **g);
    **g = s->graph;
    live++;
})
FN(cuGraphGetNodes, hipGraphGetNodes, (Graph *g, void *nodes, size_t *n), { if (nodes) return INVALID; *n = g->n; })
FN(cuGraphInstantiateWithFlags, hipGraphInstantiateWithFlags, (Graph **x, Graph *g, unsigned long long f),
    { if (f) return INVALID; *x = malloc(sizeof **x); **x = *g; live++; })
FN(cuGraphLaunch, hipGraphLaunch, (Graph *x, Stream *s), { (void)s; for (int i = 0; i < x->n; i++) run(&x->ops[i]); })
FN(cuGraphExecDestroy, hipGraphExecDestroy, (Graph *x), { free(x); live--; })
FN(cuGraphDestroy, hipGraphDestroy, (Graph *g), { free(g); live--; })
FN(cuEventCreate, hipEventCreateWithFlags, (void **e, unsigned f), { if (f) return INVALID; *e = calloc(1, 4); live++; })
FN(cuEventDestroy_v2, hipEventDestroy, (void *e), { free(e); live--; })
FN(cuEventRecord, hipEventRecord, (int *e, Stream *s), { (void)s; *e = 1; })
FN(cuEventSynchronize, hipEventSynchronize, (int *e), { (void)e; })
FN(cuEventElapsedTime, hipEventElapsedTime, (float *ms, int *a, int *b), { if (!*a || !*b) return INVALID; *ms = 2.5f; })

FN(cuModuleLoadData, hipModuleLoadData, (void **m, const char *image),
    { if (strncmp(image, "CODE", 4)) return INVALID; *m = malloc(1); live++; })
FN(cuModuleUnload, hipModuleUnload, (void *m), { free(m); live--; })
FN(cuModuleGetFunction, hipModuleGetFunction, (void **f, void *m, const char *name),
    { (void)m; if (strcmp(name, "add_one")) return INVALID; *f = (void *)ADD_ONE; })
FN(cuFuncGetAttribute, hipFuncGetAttribute, (int *v, int a, void *f), { (void)f; *v = 10 + a; })
// add_one(float *x, long long skip, int n): x[skip..skip + n] += 1
FN(cuLaunchKernel, hipModuleLaunchKernel,
    (void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
     unsigned shared, Stream *s, void **params, void **extra),
    {
        if (f != (void *)ADD_ONE || extra || gx * gy * gz * bx * by * bz == 0 || shared > 1024)
            return INVALID;
        float *x = *(float **)params[0];
        long long skip = *(long long *)params[1];
        int n = *(int *)params[2];
        return queue(s, (Op){ADD_ONE, (uint64_t)(x + skip), 0, n, 0});
    })

// The compiler: the code is "CODE", the options and the source.
typedef struct { char *source, *code; char log[64]; } Program;
const char *NAME(nvrtcGetErrorString, hiprtcGetErrorString)(int code) {
    return code == 6 ? "stand-in: compilation" : "stand-in: compiler";
}
FREE_FN(nvrtcVersion, hiprtcVersion, (int *major, int *minor), { *major = 13; *minor = 0; })
FREE_FN(nvrtcCreateProgram, hiprtcCreateProgram,
    (Program **p, const char *source, const char *name, int n, const char **headers, const char **names),
    {
        *p = calloc(1, sizeof **p);
        (*p)->source = calloc(1, 65536);
        live++;
        strcat(strcat((*p)->source, name), source);
        for (int i = 0; i < n; i++) strcat(strcat((*p)->source, names[i]), headers[i]);
    })
FREE_FN(nvrtcDestroyProgram, hiprtcDestroyProgram, (Program **p),
    { free((*p)->source); free((*p)->code); free(*p); *p = 0; live--; })
FREE_FN(nvrtcCompileProgram, hiprtcCompileProgram, (Program *p, int n, const char **options), {
    if (strstr(p->source, "#error")) { strcpy(p->log, "line 1: no such thing"); return 6; }
    p->code = calloc(1, 131072);
    strcpy(p->code, "CODE");
    for (int i = 0; i < n; i++) strcat(strcat(p->code, " "), options[i]);
    strcat(strcat(p->code, "\n"), p->source);
})
FREE_FN(nvrtcGetProgramLogSize, hiprtcGetProgramLogSize, (Program *p, size_t *n), { *n = strlen(p->log) + 1; })
FREE_FN(nvrtcGetProgramLog, hiprtcGetProgramLog, (Program *p, char *log), { strcpy(log, p->log); })
FREE_FN(nvrtcGetCUBINSize, hiprtcGetCodeSize, (Program *p, size_t *n), { *n = strlen(p->code); })
FREE_FN(nvrtcGetCUBIN, hiprtcGetCode, (Program *p, char *code), { memcpy(code, p->code, strlen(p->code)); })

// BLAS: column-major, op(A) op(B), as the vendors document it.
enum { OP_N = NAME(0, 111), OP_T = NAME(1, 112), F32_SUMS = NAME(68, 2), ALGORITHM = NAME(-1, 160) };
const char *NAME(cublasGetStatusString, hipblasStatusToString)(int code) { (void)code; return "stand-in: BLAS"; }
FN(cublasCreate_v2, hipblasCreate, (void **h), { *h = malloc(1); live++; })
FN(cublasDestroy_v2, hipblasDestroy, (void *h), { free(h); live--; })
FREE_FN(cublasSetStream_v2, hipblasSetStream, (void *h, void *s), { (void)h; if (!s) return INVALID; })
FREE_FN(cublasSetMathMode, hipblasSetMathMode, (void *h, int mode), { (void)h; if (mode != NAME(16, 0)) return INVALID; })
#ifndef ROCM
FREE_FN(cublasSetWorkspace_v2, , (void *h, void *at, size_t n), { (void)h; if (!at || n < 1024) return INVALID; })
#endif
static float load(const void *at, int type, int64_t i) {
    if (type == 0) return ((const float *)at)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)at)[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
FREE_FN(cublasGemmStridedBatchedEx, hipblasGemmStridedBatchedEx_v2,
    (void *h, int opa, int opb, int m, int n, int k, const float *alpha, const void *a, int at, int lda,
     int64_t sa, const void *b, int bt, int ldb, int64_t sb, const float *beta, float *c, int ct, int ldc,
     int64_t sc, int batches, int compute, int algorithm),
    {
        (void)h;
        int known = (opa == OP_N || opa == OP_T) && opb == OP_N && compute == F32_SUMS;
        if (!known || algorithm != ALGORITHM || ct != 0 || (at != 0 && at != 14) || at != bt) return 15;
        for (int x = 0; x < batches; x++)
            for (int j = 0; j < n; j++)
                for (int i = 0; i < m; i++) {
                    float sum = 0;
                    for (int l = 0; l < k; l++) {
                        int64_t ai = opa == OP_T ? l + (int64_t)i * lda : i + (int64_t)l * lda;
                        sum += load(a, at, ai + x * sa) * load(b, bt, l + (int64_t)j * ldb + x * sb);
                    }
                    float *out = c + i + (int64_t)j * ldc + x * sc;
                    *out = *alpha * sum + (*beta == 0 ? 0 : *beta * *out);
                }
    })
FREE_FN(cublasGemmEx, hipblasGemmEx_v2,
    (void *h, int opa, int opb, int m, int n, int k, const float *alpha, const void *a, int at, int lda,
     const void *b, int bt, int ldb, const float *beta, float *c, int ct, int ldc, int compute, int algorithm),
    {
        return NAME(cublasGemmStridedBatchedEx, hipblasGemmStridedBatchedEx_v2)(
            h, opa, opb, m, n, k, alpha, a, at, lda, 0, b, bt, ldb, 0, beta, c, ct, ldc, 0, 1, compute, algorithm);
    })
