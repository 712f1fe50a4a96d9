/* A fake CANN: the functions of libascendcl.so that torch_npu loads, on host memory.
 *
 * It is for tests that run the genuine torch_npu without an Ascend device. Device memory is host
 * memory, copies are done at once, streams and events are handles without a queue behind them, and
 * kernels do nothing: whoever wants their results computes them on the CPU. What is not here, such
 * as collectives and graphs, torch_npu looks up only when it is used.
 *
 * Tests drive it by the functions at the end (fake_cann_...): they inject error codes, say which
 * memory is faulty and whether events are over, and count calls.
 */

#define _POSIX_C_SOURCE 200809L
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef int aclError;
typedef void *Handle; /* streams, events, contexts */

enum {
    SUCCESS = 0,
    NO_CONTEXT = 107002,
    OUT_OF_MEMORY = 207001,
};

enum { DEVICES = 2 };
static const size_t DEVICE_MEMORY_BYTES = (size_t)64 << 30;
static const size_t PAGE_BYTES = 4096;

/* As in acl_rt.h. */
typedef struct {
    void *address;
    size_t bytes;
    size_t reserved[14];
} UceRegion;

static _Thread_local int current_device = -1;
static atomic_int wait_error, work_error, events_pending;
static UceRegion faulty; /* of 0 bytes where none is */

/* -- counting calls ------------------------------------------------------------------------- */

#define COUNTED(X)                     \
    X(aclrtDeviceTaskAbort)            \
    X(aclrtMemcpy)                     \
    X(aclrtMemcpyAsync)                \
    X(aclrtMemUceRepair)               \
    X(aclrtRecordEvent)                \
    X(aclrtStreamWaitEvent)            \
    X(aclrtSynchronizeDevice)          \
    X(aclrtSynchronizeEvent)           \
    X(aclrtSynchronizeStream)

#define INDEX(name) INDEX_OF_##name,
#define NAME(name) #name,
enum { COUNTED(INDEX) COUNTERS };
static const char *const counted_names[] = {COUNTED(NAME)};
static atomic_long counters[COUNTERS];

#define COUNT(name) atomic_fetch_add(&counters[INDEX_OF_##name], 1)

/* -- device memory -------------------------------------------------------------------------- */

/* Every block has a header page, which holds its size, so that the device can be full. */
static atomic_size_t used_bytes;

static aclError allocate(void **block, size_t bytes)
{
    size_t whole = bytes + PAGE_BYTES;
    char *start;
    if (atomic_fetch_add(&used_bytes, whole) + whole > DEVICE_MEMORY_BYTES
        || posix_memalign((void **)&start, PAGE_BYTES, whole) != 0) {
        atomic_fetch_sub(&used_bytes, whole);
        return OUT_OF_MEMORY;
    }
    *(size_t *)start = whole;
    *block = start + PAGE_BYTES;
    return SUCCESS;
}

aclError aclrtMalloc(void **block, size_t bytes, int policy)
{
    (void)policy;
    return allocate(block, bytes);
}

aclError aclrtMallocAlign32(void **block, size_t bytes, int policy)
{
    (void)policy;
    return allocate(block, bytes);
}

aclError aclrtFree(void *block)
{
    char *start = (char *)block - PAGE_BYTES;
    atomic_fetch_sub(&used_bytes, *(size_t *)start);
    free(start);
    return SUCCESS;
}

aclError aclrtGetMemInfo(int kind, size_t *unused, size_t *total)
{
    (void)kind;
    *total = DEVICE_MEMORY_BYTES;
    *unused = DEVICE_MEMORY_BYTES - atomic_load(&used_bytes);
    return SUCCESS;
}

aclError aclrtMallocHost(void **block, size_t bytes)
{
    return posix_memalign(block, PAGE_BYTES, bytes) == 0 ? SUCCESS : OUT_OF_MEMORY;
}

aclError aclrtFreeHost(void *block)
{
    free(block);
    return SUCCESS;
}

aclError aclrtMemset(void *block, size_t room, int value, size_t bytes)
{
    (void)room;
    memset(block, value, bytes);
    return SUCCESS;
}

/* -- work for the device, and waiting for it ------------------------------------------------- */

static aclError copy(void *to, const void *from, size_t bytes)
{
    aclError error = work_error;
    if (error == SUCCESS)
        memcpy(to, from, bytes);
    return error;
}

aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind)
{
    (void)room, (void)kind;
    COUNT(aclrtMemcpy);
    return copy(to, from, bytes);
}

aclError aclrtMemcpyAsync(
    void *to, size_t room, const void *from, size_t bytes, int kind, Handle stream)
{
    (void)room, (void)kind, (void)stream;
    COUNT(aclrtMemcpyAsync);
    return copy(to, from, bytes);
}

#define WAITS(name, counter)                   \
    aclError name(void)                        \
    {                                          \
        COUNT(counter);                        \
        return wait_error;                     \
    }
WAITS(aclrtSynchronizeDevice, aclrtSynchronizeDevice)
WAITS(aclrtSynchronizeDeviceWithTimeout, aclrtSynchronizeDevice)
WAITS(aclrtSynchronizeEvent, aclrtSynchronizeEvent)
WAITS(aclrtSynchronizeStream, aclrtSynchronizeStream)
WAITS(aclrtSynchronizeStreamWithTimeout, aclrtSynchronizeStream)

#define DOES(name, outcome)   \
    aclError name(void)       \
    {                         \
        COUNT(name);          \
        return outcome;       \
    }
DOES(aclrtRecordEvent, work_error)
DOES(aclrtStreamWaitEvent, work_error)
DOES(aclrtDeviceTaskAbort, SUCCESS)
DOES(aclrtMemUceRepair, SUCCESS)

/* What the last failed call of this thread gave. */
static aclError last_error(void)
{
    return wait_error ? wait_error : work_error;
}

aclError aclrtPeekAtLastError(int level)
{
    (void)level;
    return last_error();
}

aclError aclrtGetLastError(int level)
{
    (void)level;
    return last_error();
}

const char *aclGetRecentErrMsg(void)
{
    return "";
}

aclError aclrtQueryEventStatus(Handle event, int *status)
{
    (void)event;
    *status = !events_pending; /* 1: it is over */
    return SUCCESS;
}

aclError aclrtQueryEventWaitStatus(Handle event, int *status)
{
    (void)event;
    *status = 0;
    return SUCCESS;
}

aclError aclrtEventElapsedTime(float *milliseconds, Handle start, Handle end)
{
    (void)start, (void)end;
    *milliseconds = 1.0f;
    return SUCCESS;
}

/* -- devices, streams, events ---------------------------------------------------------------- */

aclError aclrtGetDeviceCount(unsigned *count)
{
    const char *setting = getenv("FAKE_CANN_DEVICES");
    *count = setting != NULL ? (unsigned)atoi(setting) : DEVICES;
    return SUCCESS;
}

aclError aclrtSetDevice(int device)
{
    current_device = device;
    return SUCCESS;
}

aclError aclrtGetDevice(int *device)
{
    if (current_device < 0)
        return NO_CONTEXT;
    *device = current_device;
    return SUCCESS;
}

aclError aclrtGetCurrentContext(Handle *context)
{
    static char contexts[DEVICES];
    *context = &contexts[current_device < 0 ? 0 : current_device % DEVICES];
    return SUCCESS;
}

const char *aclrtGetSocName(void)
{
    return "Ascend910B3";
}

static aclError make(Handle *handle)
{
    *handle = malloc(1);
    return *handle != NULL ? SUCCESS : OUT_OF_MEMORY;
}

aclError aclrtCreateStream(Handle *stream)
{
    return make(stream);
}

aclError aclrtCreateStreamWithConfig(Handle *stream, unsigned priority, unsigned flags)
{
    (void)priority, (void)flags;
    return make(stream);
}

aclError aclrtCreateEventWithFlag(Handle *event, unsigned flags)
{
    (void)flags;
    return make(event);
}

aclError aclrtCreateEventExWithFlag(Handle *event, unsigned flags)
{
    (void)flags;
    return make(event);
}

#define FREES(name)                \
    aclError name(Handle handle)   \
    {                              \
        free(handle);              \
        return SUCCESS;            \
    }
FREES(aclrtDestroyEvent)
FREES(aclrtDestroyStream)
FREES(aclrtDestroyStreamForce)

aclError aclrtGetSysParamOpt(int option, long *value)
{
    (void)option;
    *value = 0;
    return SUCCESS;
}

aclError aclrtCtxGetSysParamOpt(int option, long *value)
{
    return aclrtGetSysParamOpt(option, value);
}

/* -- faulty memory --------------------------------------------------------------------------- */

aclError aclrtGetMemUceInfo(int device, UceRegion *regions, size_t room, size_t *count)
{
    (void)device;
    *count = faulty.bytes != 0 && room != 0;
    if (*count != 0)
        regions[0] = faulty;
    return SUCCESS;
}

/* -- what only has to be there ---------------------------------------------------------------- */

/* Whatever it is asked for, it succeeds: 0 is success, "nothing", or a null pointer. */
#define SUCCEEDS(name) \
    long name(void)    \
    {                  \
        return 0;      \
    }
#define FOR_EACH_THAT_SUCCEEDS(X)                                                              \
    X(MsprofGetHashId) X(MsprofRegisterCallback) X(MsprofReportAdditionalInfo)                 \
    X(MsprofReportApi) X(MsprofReportCompactInfo) X(MsprofSysCycleTime)                        \
    X(aclAppLog) X(aclFinalize) X(aclGetDeviceCapability) X(aclInit) X(aclSetCompileopt)       \
    X(aclCreateDataBuffer) X(aclDestroyDataBuffer)                                             \
    X(aclCreateTensorDesc) X(aclDestroyTensorDesc) X(aclGetTensorDescDimV2)                    \
    X(aclGetTensorDescFormat) X(aclGetTensorDescNumDims) X(aclGetTensorDescType)               \
    X(aclSetTensorDescName) X(aclSetTensorFormat) X(aclSetTensorPlaceMent)                     \
    X(aclSetTensorShape)                                                                       \
    X(aclmdlFinalizeDump) X(aclmdlInitDump) X(aclmdlSetDump)                                   \
    X(aclopCompileAndExecute) X(aclopCreateAttr) X(aclopDestroyAttr) X(aclopSetAttrBool)       \
    X(aclopSetAttrDataType) X(aclopSetAttrFloat) X(aclopSetAttrInt) X(aclopSetAttrListBool)    \
    X(aclopSetAttrListFloat) X(aclopSetAttrListInt) X(aclopSetAttrListListInt)                 \
    X(aclopSetAttrString)                                                                      \
    X(aclrtBinaryGetFunction) X(aclrtBinaryLoadFromData)                                       \
    X(aclrtDeviceCanAccessPeer) X(aclrtDeviceEnablePeerAccess) X(aclrtDeviceGetBareTgid)       \
    X(aclrtFreePhysical) X(aclrtGetFunctionAddr) X(aclrtMallocPhysical) X(aclrtMapMem)         \
    X(aclrtMemExportToShareableHandle) X(aclrtMemImportFromShareableHandle)                    \
    X(aclrtMemSetPidToShareableHandle) X(aclrtProcessReport) X(aclrtReleaseMemAddress)         \
    X(aclrtReserveMemAddress) X(aclrtResetDevice) X(aclrtResetEvent)                           \
    X(aclrtSetCurrentContext) X(aclrtSetDeviceSatMode) X(aclrtSetOpExecuteTimeOut)             \
    X(aclrtUnmapMem)                                                                           \
    X(rtDevBinaryRegister) X(rtFunctionRegister) X(rtGetC2cCtrlAddr) X(rtKernelLaunch)
FOR_EACH_THAT_SUCCEEDS(SUCCEEDS)

/* -- for tests -------------------------------------------------------------------------------- */

/* From now on, whatever waits for the device fails with `code`; 0: nothing does. */
void fake_cann_fail_waits(int code)
{
    atomic_store(&wait_error, code);
}

/* From now on, copies, records of events and waits of streams fail with `code` when they are handed
 * to the device; 0: none does. */
void fake_cann_fail_work(int code)
{
    atomic_store(&work_error, code);
}

/* While they are pending, no event is over for who asks; who waits for one does not wait. */
void fake_cann_keep_events_pending(int pending)
{
    atomic_store(&events_pending, pending);
}

/* Memory [address, address + bytes) has an uncorrectable error; 0 bytes: none has. */
void fake_cann_fault_in_memory(void *address, size_t bytes)
{
    faulty = (UceRegion){.address = address, .bytes = bytes};
}

/* How often the function of that name was called; -1 if it is not counted. */
long fake_cann_calls(const char *name)
{
    for (int i = 0; i < COUNTERS; i++)
        if (strcmp(counted_names[i], name) == 0)
            return atomic_load(&counters[i]);
    return -1;
}
