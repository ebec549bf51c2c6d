/* A stand-in for libnvidia-ml.so.1 that answers from a text file, so that the unmodified nvidia-ml-py (ours and the
   copy inside Ray) reads "GPUs" on a machine that has none. `tidegate.testing.fake_nvml` builds it and writes the file.

   FAKE_NVML_STATE names the file. It is read again whenever it changes. One `key=value` a line, the last one wins, `#`
   starts a comment:

     sys.count=8              GPUs that NVML lists
     sys.driver=570.86.15     driver version
     sys.init_error=9         nvmlInit returns this code
     sys.error=18             every call after nvmlInit returns this code
     gpu.3.temp=81            GPU 3; `gpu.*.temp=61` is for all GPUs that have no line of their own
     gpu.3.temp=!3            a value of `!N` makes that one call return the code N
     gpu.3.temp_v=!13         only nvmlDeviceGetTemperatureV, as on a driver that lacks it
     gpu.3.error=15           every call on this GPU returns this code (15: the GPU is lost)
     gpu.3.handle_error=15    only opening it fails
     gpu.3.delay_ms=60000     every call on this GPU hangs this long, or until the line says otherwise
     gpu.3.field.230.0=1      field value, by field id and scope
     gpu.3.gpm.5=41.5         GPM metric, by its id, in NVML's unit
     gpu.3.xid_seq=1:79       XID 79 happens when the number before the colon changes
     sys.wait_error=15        waiting for events returns this code
     gpu.3.clock.1=1980       clock (1: SM, 2: memory) in MHz; clock_max.1 the highest
     gpu.3.reasons=0x40       why clocks are low; `reasons_v=!13`: only the newer of the two calls
     gpu.3.ecc.1.0=2          ECC errors by kind (1: uncorrected) and counter (0: volatile, 1: aggregate); ecc_mode=1
     gpu.3.rows=0,1,1,0       remapped rows: correctable, uncorrectable, pending, failure
     gpu.3.banks=640,0,0,0,2  banks by spare rows left: max, high, partial, low, none
     gpu.3.fabric=3,1,0       fabric: state, health summary, health mask
     gpu.3.threshold.1=89     temperature threshold by NVML's number
     gpu.3.nvlink.7=0         nvmlDeviceGetNvLinkState of one link
   and uuid, name, pci, margin, util, mem_total, mem_used, power_mw, power_limit_mw, energy_mj, processes (how many it
   lists), mig, sram_threshold, pcie_gen, pcie_gen_max, pcie_width, pcie_width_max, events (mask of what it can tell).
   A key that is missing reads as NOT_SUPPORTED. */

#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    ARGUMENT_VERSION_MISMATCH = 25,
};

enum { MAX_GPUS = 64, MAX_LINES = 4096, KEY_SIZE = 96, VALUE_SIZE = 160, MAX_FUNCTIONS = 64 };

typedef int nvmlReturn_t;

/* --- the state file ---------------------------------------------------------------------------------------------- */

static struct line {
    char key[KEY_SIZE];
    char value[VALUE_SIZE];
} lines[MAX_LINES];

static struct line *by_key[MAX_LINES]; /* sorted, so that the fake costs less than what is measured with it */

static int line_count;
static bool state_there;
static struct stat state_seen;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards everything above, and the counters below */
static int initialized;

/* By key, and equal ones as they stand in the file. */
static int in_order(const void *left, const void *right) {
    const struct line *a = *(struct line *const *)left, *b = *(struct line *const *)right;
    int order = strcmp(a->key, b->key);
    return order != 0 ? order : (a > b) - (a < b);
}

/* Caller holds the mutex. The inode is compared too: two edits by rename may fall into one tick of the file system's
   clock. */
static void reload(void) {
    const char *path = getenv("FAKE_NVML_STATE");
    struct stat now;
    if (path == NULL || stat(path, &now) != 0) {
        line_count = 0;
        state_there = false;
        return;
    }
    if (state_there && now.st_ino == state_seen.st_ino && now.st_size == state_seen.st_size &&
        now.st_mtim.tv_sec == state_seen.st_mtim.tv_sec && now.st_mtim.tv_nsec == state_seen.st_mtim.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return;
    line_count = 0;
    char text[KEY_SIZE + VALUE_SIZE + 2];
    while (line_count < MAX_LINES && fgets(text, sizeof text, file) != NULL) {
        text[strcspn(text, "\n")] = '\0';
        char *equals = strchr(text, '=');
        if (text[0] == '#' || equals == NULL)
            continue;
        *equals = '\0';
        snprintf(lines[line_count].key, KEY_SIZE, "%.*s", KEY_SIZE - 1, text);
        snprintf(lines[line_count].value, VALUE_SIZE, "%.*s", VALUE_SIZE - 1, equals + 1);
        line_count++;
    }
    fclose(file);
    for (int i = 0; i < line_count; i++)
        by_key[i] = &lines[i];
    qsort(by_key, (size_t)line_count, sizeof *by_key, in_order);
    state_seen = now;
    state_there = true;
}

/* The last line with this key. */
static const char *find(const char *key) {
    int low = 0, high = line_count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (strcmp(by_key[middle]->key, key) <= 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low > 0 && strcmp(by_key[low - 1]->key, key) == 0 ? by_key[low - 1]->value : NULL;
}

static long system_number(const char *key) {
    const char *value = find(key);
    return value == NULL ? 0 : atol(value);
}

/* SUCCESS and the value's text, NOT_SUPPORTED where no line has it, or the code that a `!N` asks for. */
static nvmlReturn_t gpu_value(int gpu, const char *key, const char **value) {
    char full[KEY_SIZE];
    snprintf(full, sizeof full, "gpu.%d.%s", gpu, key);
    *value = find(full);
    if (*value == NULL) {
        snprintf(full, sizeof full, "gpu.*.%s", key);
        *value = find(full);
    }
    if (*value == NULL)
        return NOT_SUPPORTED;
    return (*value)[0] == '!' ? atoi(*value + 1) : SUCCESS;
}

static long gpu_number(int gpu, const char *key) {
    const char *value;
    return gpu_value(gpu, key, &value) == SUCCESS ? atol(value) : 0;
}

/* --- what tests ask the fake itself ------------------------------------------------------------------------------ */

static struct {
    const char *function;
    unsigned long calls[MAX_GPUS];
} counters[MAX_FUNCTIONS];

/* Caller holds the mutex. `function` is a __func__, so it lives for ever. */
static void count_call(const char *function, int gpu) {
    for (int i = 0; i < MAX_FUNCTIONS; i++) {
        if (counters[i].function == NULL)
            counters[i].function = function;
        if (strcmp(counters[i].function, function) == 0) {
            counters[i].calls[gpu]++;
            return;
        }
    }
}

unsigned long fake_nvml_calls(const char *function, unsigned int gpu) {
    unsigned long calls = 0;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < MAX_FUNCTIONS && counters[i].function != NULL; i++)
        if (gpu < MAX_GPUS && strcmp(counters[i].function, function) == 0)
            calls = counters[i].calls[gpu];
    pthread_mutex_unlock(&mutex);
    return calls;
}

/* --- devices: a handle is the address of one of these ------------------------------------------------------------ */

static struct device {
    char unused;
} devices[MAX_GPUS];

static void nap(long milliseconds) {
    struct timespec rest = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    nanosleep(&rest, NULL);
}

/* Outside the mutex, in short naps, so that other GPUs answer meanwhile and an edit of the file ends the hang. */
static void hang(int gpu) {
    for (long waited = 0;; waited += 10) {
        pthread_mutex_lock(&mutex);
        reload();
        long delay = gpu_number(gpu, "delay_ms");
        pthread_mutex_unlock(&mutex);
        if (waited >= delay)
            return;
        nap(10);
    }
}

/* The start of every call on a GPU. On SUCCESS the caller holds the mutex and must give it back. */
static nvmlReturn_t enter(const struct device *device, const char *function, int *gpu) {
    if (device < devices || device >= devices + MAX_GPUS)
        return INVALID_ARGUMENT;
    *gpu = (int)(device - devices);
    hang(*gpu);
    pthread_mutex_lock(&mutex);
    count_call(function, *gpu);
    nvmlReturn_t code = initialized ? (nvmlReturn_t)system_number("sys.error") : UNINITIALIZED;
    if (code == SUCCESS)
        code = *gpu < system_number("sys.count") ? (nvmlReturn_t)gpu_number(*gpu, "error") : INVALID_ARGUMENT;
    if (code != SUCCESS)
        pthread_mutex_unlock(&mutex);
    return code;
}

/* A call that answers with one value: its text is copied into `text`. */
static nvmlReturn_t ask(const struct device *device, const char *function, const char *key, char text[VALUE_SIZE]) {
    int gpu;
    nvmlReturn_t code = enter(device, function, &gpu);
    if (code != SUCCESS)
        return code;
    const char *value;
    code = gpu_value(gpu, key, &value);
    if (code == SUCCESS)
        snprintf(text, VALUE_SIZE, "%s", value);
    pthread_mutex_unlock(&mutex);
    return code;
}

static nvmlReturn_t copy_text(const char *text, char *out, unsigned int size) {
    if (strlen(text) + 1 > size)
        return INSUFFICIENT_SIZE;
    memcpy(out, text, strlen(text) + 1);
    return SUCCESS;
}

static nvmlReturn_t ask_text(const struct device *device, const char *function, const char *key, char *out,
                             unsigned int size) {
    char text[VALUE_SIZE];
    nvmlReturn_t code = ask(device, function, key, text);
    return code == SUCCESS ? copy_text(text, out, size) : code;
}

static nvmlReturn_t ask_unsigned(const struct device *device, const char *function, const char *key,
                                 unsigned int *out) {
    char text[VALUE_SIZE];
    nvmlReturn_t code = ask(device, function, key, text);
    if (code == SUCCESS)
        *out = (unsigned int)strtoul(text, NULL, 0);
    return code;
}

/* --- NVML: the library and its GPUs ------------------------------------------------------------------------------ */

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    pthread_mutex_lock(&mutex);
    reload();
    nvmlReturn_t code = state_there ? (nvmlReturn_t)system_number("sys.init_error") : DRIVER_NOT_LOADED;
    if (code == SUCCESS)
        initialized++;
    pthread_mutex_unlock(&mutex);
    return code;
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void) {
    pthread_mutex_lock(&mutex);
    nvmlReturn_t code = initialized ? SUCCESS : UNINITIALIZED;
    if (initialized)
        initialized--;
    pthread_mutex_unlock(&mutex);
    return code;
}

const char *nvmlErrorString(nvmlReturn_t code) {
    return code == SUCCESS ? "Success" : "an error made by the fake NVML";
}

/* The start of every call that is not on one GPU. On SUCCESS the caller holds the mutex. */
static nvmlReturn_t enter_system(void) {
    pthread_mutex_lock(&mutex);
    reload();
    nvmlReturn_t code = initialized ? (nvmlReturn_t)system_number("sys.error") : UNINITIALIZED;
    if (code != SUCCESS)
        pthread_mutex_unlock(&mutex);
    return code;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int size) {
    nvmlReturn_t code = enter_system();
    if (code != SUCCESS)
        return code;
    const char *text = find("sys.driver");
    code = text == NULL ? NOT_SUPPORTED : copy_text(text, version, size);
    pthread_mutex_unlock(&mutex);
    return code;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    nvmlReturn_t code = enter_system();
    if (code != SUCCESS)
        return code;
    *count = (unsigned int)system_number("sys.count");
    pthread_mutex_unlock(&mutex);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, struct device **device) {
    nvmlReturn_t code = enter_system();
    if (code != SUCCESS)
        return code;
    if (index >= MAX_GPUS || index >= system_number("sys.count"))
        code = INVALID_ARGUMENT;
    else
        code = (nvmlReturn_t)gpu_number((int)index, "handle_error");
    if (code == SUCCESS)
        *device = &devices[index];
    pthread_mutex_unlock(&mutex);
    return code;
}

nvmlReturn_t nvmlDeviceGetName(struct device *device, char *name, unsigned int size) {
    return ask_text(device, __func__, "name", name, size);
}

nvmlReturn_t nvmlDeviceGetUUID(struct device *device, char *uuid, unsigned int size) {
    return ask_text(device, __func__, "uuid", uuid, size);
}

/* --- NVML: readings ---------------------------------------------------------------------------------------------- */

typedef struct {
    unsigned int version;
    unsigned int sensor;
    int temperature;
} nvmlTemperature_v1_t;

typedef struct {
    unsigned int version;
    int margin;
} nvmlMarginTemperature_v1_t;

typedef struct {
    unsigned int gpu;
    unsigned int memory;
} nvmlUtilization_t;

typedef struct {
    unsigned long long total;
    unsigned long long free;
    unsigned long long used;
} nvmlMemory_t;

/* NVML's rule for the `version` of a struct: its size, and the number of the layout above it. */
#define VERSION_1(type) ((unsigned int)(sizeof(type) | 1u << 24))

nvmlReturn_t nvmlDeviceGetTemperatureV(struct device *device, nvmlTemperature_v1_t *out) {
    if (out->version != VERSION_1(nvmlTemperature_v1_t))
        return ARGUMENT_VERSION_MISMATCH;
    if (out->sensor != 0)
        return NOT_SUPPORTED;
    int gpu;
    nvmlReturn_t code = enter(device, __func__, &gpu);
    if (code != SUCCESS)
        return code;
    const char *value;
    code = gpu_value(gpu, "temp_v", &value);
    if (code == NOT_SUPPORTED)
        code = gpu_value(gpu, "temp", &value);
    if (code == SUCCESS)
        out->temperature = atoi(value);
    pthread_mutex_unlock(&mutex);
    return code;
}

nvmlReturn_t nvmlDeviceGetTemperature(struct device *device, int sensor, unsigned int *celsius) {
    return sensor == 0 ? ask_unsigned(device, __func__, "temp", celsius) : NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetMarginTemperature(struct device *device, nvmlMarginTemperature_v1_t *out) {
    char text[VALUE_SIZE];
    if (out->version != VERSION_1(nvmlMarginTemperature_v1_t))
        return ARGUMENT_VERSION_MISMATCH;
    nvmlReturn_t code = ask(device, __func__, "margin", text);
    if (code == SUCCESS)
        out->margin = atoi(text);
    return code;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(struct device *device, nvmlUtilization_t *out) {
    out->memory = 0;
    return ask_unsigned(device, __func__, "util", &out->gpu);
}

nvmlReturn_t nvmlDeviceGetPowerUsage(struct device *device, unsigned int *milliwatts) {
    return ask_unsigned(device, __func__, "power_mw", milliwatts);
}

static nvmlReturn_t ask_memory(struct device *device, const char *function, unsigned long long *total,
                               unsigned long long *used) {
    int gpu;
    nvmlReturn_t code = enter(device, function, &gpu);
    if (code != SUCCESS)
        return code;
    const char *total_text, *used_text;
    code = gpu_value(gpu, "mem_total", &total_text);
    if (code == SUCCESS)
        code = gpu_value(gpu, "mem_used", &used_text);
    if (code == SUCCESS) {
        *total = strtoull(total_text, NULL, 0);
        *used = strtoull(used_text, NULL, 0);
    }
    pthread_mutex_unlock(&mutex);
    return code;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(struct device *device, nvmlMemory_t *out) {
    unsigned long long total, used;
    nvmlReturn_t code = ask_memory(device, __func__, &total, &used);
    if (code == SUCCESS)
        *out = (nvmlMemory_t){.total = total, .used = used, .free = total - used};
    return code;
}

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(struct device *device, nvmlMemory_v2_t *out) {
    unsigned long long total, used;
    if (out->version != (sizeof *out | 2u << 24))
        return ARGUMENT_VERSION_MISMATCH;
    nvmlReturn_t code = ask_memory(device, __func__, &total, &used);
    if (code == SUCCESS)
        *out = (nvmlMemory_v2_t){.version = out->version, .total = total, .used = used, .free = total - used};
    return code;
}

typedef struct {
    unsigned int pid;
    unsigned long long used_bytes;
    unsigned int gpu_instance;
    unsigned int compute_instance;
} nvmlProcessInfo_t;

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(struct device *device, unsigned int *count,
                                                     nvmlProcessInfo_t *out) {
    unsigned int listed, room = *count;
    nvmlReturn_t code = ask_unsigned(device, __func__, "processes", &listed);
    if (code != SUCCESS)
        return code;
    *count = listed;
    if (listed > room)
        return INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < listed; i++)
        out[i] = (nvmlProcessInfo_t){.pid = 1000 + i};
    return SUCCESS;
}

enum { VALUE_DOUBLE = 0, VALUE_UNSIGNED_LONG_LONG = 3, VALUE_SIGNED_INT = 5 };

typedef struct {
    unsigned int field;
    unsigned int scope;
    long long timestamp_us;
    long long latency_us;
    int type;
    nvmlReturn_t code;
    union {
        double as_double;
        unsigned long long as_unsigned;
        int as_int;
    } value;
} nvmlFieldValue_t;

nvmlReturn_t nvmlDeviceGetFieldValues(struct device *device, int count, nvmlFieldValue_t *fields) {
    int gpu;
    nvmlReturn_t code = enter(device, __func__, &gpu);
    if (code != SUCCESS)
        return code;
    for (int i = 0; i < count; i++) {
        nvmlFieldValue_t *field = &fields[i];
        char key[KEY_SIZE];
        const char *value;
        snprintf(key, sizeof key, "field.%u.%u", field->field, field->scope);
        field->timestamp_us = (long long)time(NULL) * 1000000;
        field->latency_us = 0;
        field->value.as_unsigned = 0;
        field->code = gpu_value(gpu, key, &value);
        if (field->code != SUCCESS)
            continue;
        if (strchr(value, '.') != NULL) {
            field->type = VALUE_DOUBLE;
            field->value.as_double = atof(value);
        } else if (value[0] == '-') {
            field->type = VALUE_SIGNED_INT;
            field->value.as_int = atoi(value);
        } else {
            field->type = VALUE_UNSIGNED_LONG_LONG;
            field->value.as_unsigned = strtoull(value, NULL, 0);
        }
    }
    pthread_mutex_unlock(&mutex);
    return SUCCESS;
}

/* --- NVML: GPM (a sample is a point in time; the metric is that of the state file) ------------------------------- */

enum { GPM_METRICS = 477, GPM_MIN_WINDOW_MS = 100 };

typedef struct {
    int gpu;
    double at_ms;
} nvmlGpmSample;

typedef struct {
    unsigned int id;
    nvmlReturn_t code;
    double value;
    const char *short_name, *long_name, *unit;
} nvmlGpmMetric_t;

typedef struct {
    unsigned int version;
    unsigned int count;
    nvmlGpmSample *older, *newer;
    nvmlGpmMetric_t metrics[GPM_METRICS];
} nvmlGpmMetricsGet_t;

nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample **sample) {
    *sample = calloc(1, sizeof **sample);
    return SUCCESS;
}

nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample *sample) {
    free(sample);
    return SUCCESS;
}

nvmlReturn_t nvmlGpmSampleGet(struct device *device, nvmlGpmSample *sample) {
    char text[VALUE_SIZE];
    nvmlReturn_t code = ask(device, __func__, "gpm", text);
    if (code != SUCCESS)
        return code;
    if (atoi(text) == 0)
        return NOT_SUPPORTED;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    sample->gpu = (int)(device - devices);
    sample->at_ms = now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
    return SUCCESS;
}

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *request) {
    if (request->version != 1)
        return ARGUMENT_VERSION_MISMATCH;
    if (request->older == NULL || request->newer == NULL || request->older->gpu != request->newer->gpu ||
        request->newer->at_ms - request->older->at_ms < GPM_MIN_WINDOW_MS)
        return INVALID_ARGUMENT;
    int gpu;
    nvmlReturn_t code = enter(&devices[request->newer->gpu], __func__, &gpu);
    if (code != SUCCESS)
        return code;
    for (unsigned int i = 0; i < request->count && i < GPM_METRICS; i++) {
        nvmlGpmMetric_t *metric = &request->metrics[i];
        char key[KEY_SIZE];
        const char *value;
        snprintf(key, sizeof key, "gpm.%u", metric->id);
        metric->code = gpu_value(gpu, key, &value);
        metric->value = metric->code == SUCCESS ? atof(value) : 0.0;
        metric->short_name = metric->long_name = metric->unit = "";
    }
    pthread_mutex_unlock(&mutex);
    return SUCCESS;
}

/* --- NVML: counters, limits and states ---------------------------------------------------------------------------- */

static nvmlReturn_t ask_long(const struct device *device, const char *function, const char *key,
                             unsigned long long *out) {
    char text[VALUE_SIZE];
    nvmlReturn_t code = ask(device, function, key, text);
    if (code == SUCCESS)
        *out = strtoull(text, NULL, 0);
    return code;
}

/* `3,1,0`: as many numbers as there is room for; what the line lacks is 0. */
static nvmlReturn_t ask_list(const struct device *device, const char *function, const char *key, unsigned int *out,
                             int room) {
    char text[VALUE_SIZE];
    nvmlReturn_t code = ask(device, function, key, text);
    if (code != SUCCESS)
        return code;
    char *rest = text;
    for (int i = 0; i < room; i++) {
        out[i] = (unsigned int)strtoul(rest, &rest, 0);
        if (*rest == ',')
            rest++;
    }
    return SUCCESS;
}

static nvmlReturn_t ask_numbered(const struct device *device, const char *function, const char *key, int number,
                                 unsigned int *out) {
    char full[KEY_SIZE];
    snprintf(full, sizeof full, "%s.%d", key, number);
    return ask_unsigned(device, function, full, out);
}

nvmlReturn_t nvmlDeviceGetClockInfo(struct device *device, int type, unsigned int *megahertz) {
    return ask_numbered(device, __func__, "clock", type, megahertz);
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(struct device *device, int type, unsigned int *megahertz) {
    return ask_numbered(device, __func__, "clock_max", type, megahertz);
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(struct device *device, unsigned long long *mask) {
    return ask_long(device, __func__, "reasons", mask);
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(struct device *device, unsigned long long *mask) {
    nvmlReturn_t code = ask_long(device, __func__, "reasons_v", mask);
    return code == NOT_SUPPORTED ? ask_long(device, __func__, "reasons", mask) : code;
}

nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(struct device *device, unsigned int *milliwatts) {
    return ask_unsigned(device, __func__, "power_limit_mw", milliwatts);
}

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(struct device *device, unsigned long long *millijoules) {
    return ask_long(device, __func__, "energy_mj", millijoules);
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(struct device *device, unsigned int *mode) {
    return ask_unsigned(device, __func__, "persistence_mode", mode);
}

nvmlReturn_t nvmlDeviceGetEccMode(struct device *device, unsigned int *current, unsigned int *pending) {
    nvmlReturn_t code = ask_unsigned(device, __func__, "ecc_mode", current);
    *pending = *current;
    return code;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(struct device *device, int kind, int counter, unsigned long long *count) {
    char key[KEY_SIZE];
    snprintf(key, sizeof key, "ecc.%d.%d", kind, counter);
    return ask_long(device, __func__, key, count);
}

nvmlReturn_t nvmlDeviceGetRemappedRows(struct device *device, unsigned int *correctable, unsigned int *uncorrectable,
                                       unsigned int *pending, unsigned int *failure) {
    unsigned int rows[4];
    nvmlReturn_t code = ask_list(device, __func__, "rows", rows, 4);
    if (code == SUCCESS) {
        *correctable = rows[0];
        *uncorrectable = rows[1];
        *pending = rows[2];
        *failure = rows[3];
    }
    return code;
}

typedef struct {
    unsigned int max, high, partial, low, none;
} nvmlRowRemapperHistogramValues_t;

nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(struct device *device, nvmlRowRemapperHistogramValues_t *out) {
    return ask_list(device, __func__, "banks", &out->max, 5);
}

typedef struct {
    unsigned int version;
    unsigned long long counts[11];
    unsigned int threshold_exceeded;
} nvmlEccSramErrorStatus_v1_t;

nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(struct device *device, nvmlEccSramErrorStatus_v1_t *out) {
    if (out->version != VERSION_1(nvmlEccSramErrorStatus_v1_t))
        return ARGUMENT_VERSION_MISMATCH;
    return ask_unsigned(device, __func__, "sram_threshold", &out->threshold_exceeded);
}

nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(struct device *device, unsigned int *generation) {
    return ask_unsigned(device, __func__, "pcie_gen", generation);
}

nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(struct device *device, unsigned int *generation) {
    return ask_unsigned(device, __func__, "pcie_gen_max", generation);
}

nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(struct device *device, unsigned int *lanes) {
    return ask_unsigned(device, __func__, "pcie_width", lanes);
}

nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(struct device *device, unsigned int *lanes) {
    return ask_unsigned(device, __func__, "pcie_width_max", lanes);
}

nvmlReturn_t nvmlDeviceGetNvLinkState(struct device *device, unsigned int link, unsigned int *active) {
    return ask_numbered(device, __func__, "nvlink", (int)link, active);
}

nvmlReturn_t nvmlDeviceGetMigMode(struct device *device, unsigned int *current, unsigned int *pending) {
    nvmlReturn_t code = ask_unsigned(device, __func__, "mig", current);
    *pending = *current;
    return code;
}

nvmlReturn_t nvmlDeviceGetTemperatureThreshold(struct device *device, int threshold, unsigned int *celsius) {
    return ask_numbered(device, __func__, "threshold", threshold, celsius);
}

typedef struct {
    unsigned int version;
    unsigned char cluster_uuid[16];
    nvmlReturn_t status;
    unsigned int clique;
    unsigned char state;
    unsigned int health_mask;
    unsigned char health_summary;
} nvmlGpuFabricInfo_v3_t;

nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(struct device *device, nvmlGpuFabricInfo_v3_t *out) {
    if (out->version != (sizeof *out | 3u << 24))
        return ARGUMENT_VERSION_MISMATCH;
    unsigned int found[3];
    nvmlReturn_t code = ask_list(device, __func__, "fabric", found, 3);
    if (code == SUCCESS) {
        out->status = SUCCESS;
        out->state = (unsigned char)found[0];
        out->health_summary = (unsigned char)found[1];
        out->health_mask = found[2];
    }
    return code;
}

typedef struct {
    char bus_id_legacy[16];
    unsigned int domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} nvmlPciInfo_t;

nvmlReturn_t nvmlDeviceGetPciInfo_v3(struct device *device, nvmlPciInfo_t *out) {
    return ask_text(device, __func__, "pci", out->bus_id, sizeof out->bus_id);
}

/* --- NVML: events (only what happens after a GPU was registered; a quiet wait ends with TIMEOUT) ------------------- */

enum { EVENT_XID = 8 };

typedef struct {
    bool registered[MAX_GPUS];
    long seen[MAX_GPUS];
} nvmlEventSet;

typedef struct {
    struct device *device;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
} nvmlEventData_t;

/* Caller holds the mutex. The number of the last XID and the XID; 0 if there was none. */
static long last_xid(int gpu, unsigned long long *xid) {
    const char *value;
    if (gpu_value(gpu, "xid_seq", &value) != SUCCESS || strchr(value, ':') == NULL)
        return 0;
    *xid = strtoull(strchr(value, ':') + 1, NULL, 0);
    return atol(value);
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet **set) {
    *set = calloc(1, sizeof **set);
    return SUCCESS;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet *set) {
    free(set);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(struct device *device, unsigned long long *types) {
    return ask_long(device, __func__, "events", types);
}

nvmlReturn_t nvmlDeviceRegisterEvents(struct device *device, unsigned long long types, nvmlEventSet *set) {
    int gpu;
    nvmlReturn_t code = enter(device, __func__, &gpu);
    if (code != SUCCESS)
        return code;
    unsigned long long xid;
    set->registered[gpu] = (types & EVENT_XID) != 0;
    set->seen[gpu] = last_xid(gpu, &xid);
    pthread_mutex_unlock(&mutex);
    return SUCCESS;
}

/* Sleeps until a file beside the state is written or renamed, as the real call sleeps in the driver: looking again and
   again would cost more than what is measured with this library. */
static int watch_state(void) {
    const char *path = getenv("FAKE_NVML_STATE");
    char folder[4096];
    if (path == NULL || strlen(path) >= sizeof folder)
        return -1;
    strcpy(folder, path);
    char *slash = strrchr(folder, '/');
    if (slash == NULL)
        strcpy(folder, ".");
    else
        *slash = '\0';
    int watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (watch >= 0 && inotify_add_watch(watch, folder, IN_CLOSE_WRITE | IN_MOVED_TO) < 0) {
        close(watch);
        return -1;
    }
    return watch;
}

static void await_edit(int watch, unsigned int timeout_ms) {
    if (watch < 0) {
        nap(timeout_ms < 100 ? timeout_ms : 100);
        return;
    }
    struct pollfd edit = {.fd = watch, .events = POLLIN};
    char told[4096];
    if (poll(&edit, 1, (int)timeout_ms) > 0)
        while (read(watch, told, sizeof told) > 0)
            ;
}

static unsigned long long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (unsigned long long)now.tv_sec * 1000 + (unsigned long long)now.tv_nsec / 1000000;
}

/* SUCCESS, TIMEOUT where nothing has happened, or why there is no answer. */
static nvmlReturn_t next_event(nvmlEventSet *set, nvmlEventData_t *out) {
    nvmlReturn_t code = enter_system();
    if (code != SUCCESS)
        return code;
    code = (nvmlReturn_t)system_number("sys.wait_error");
    for (int gpu = 0; code == SUCCESS && gpu < MAX_GPUS; gpu++) {
        unsigned long long xid = 0;
        long number = set->registered[gpu] ? last_xid(gpu, &xid) : 0;
        if (number == 0 || number == set->seen[gpu])
            continue;
        set->seen[gpu] = number;
        *out = (nvmlEventData_t){.device = &devices[gpu], .type = EVENT_XID, .data = xid,
                                 .gpu_instance = 0xFFFFFFFF, .compute_instance = 0xFFFFFFFF};
        pthread_mutex_unlock(&mutex);
        return SUCCESS;
    }
    pthread_mutex_unlock(&mutex);
    return code == SUCCESS ? TIMEOUT : code;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet *set, nvmlEventData_t *out, unsigned int timeout_ms) {
    unsigned long long until_ms = now_ms() + timeout_ms;
    int watch = timeout_ms > 0 ? watch_state() : -1;
    nvmlReturn_t code;
    for (;;) {
        code = next_event(set, out);
        unsigned long long now = now_ms();
        if (code != TIMEOUT || now >= until_ms)
            break;
        await_edit(watch, (unsigned int)(until_ms - now));
    }
    if (watch >= 0)
        close(watch);
    return code;
}

/* --- what the contract test compares with nvidia-ml-py's own structs --------------------------------------------- */

unsigned long fake_nvml_sizeof(const char *type) {
    const struct {
        const char *name;
        unsigned long size;
    } sizes[] = {
        {"c_nvmlTemperature_v1_t", sizeof(nvmlTemperature_v1_t)},
        {"c_nvmlMarginTemperature_v1_t", sizeof(nvmlMarginTemperature_v1_t)},
        {"c_nvmlUtilization_t", sizeof(nvmlUtilization_t)},
        {"c_nvmlMemory_t", sizeof(nvmlMemory_t)},
        {"c_nvmlMemory_v2_t", sizeof(nvmlMemory_v2_t)},
        {"c_nvmlProcessInfo_v2_t", sizeof(nvmlProcessInfo_t)},
        {"c_nvmlFieldValue_t", sizeof(nvmlFieldValue_t)},
        {"c_nvmlRowRemapperHistogramValues", sizeof(nvmlRowRemapperHistogramValues_t)},
        {"c_nvmlEccSramErrorStatus_v1_t", sizeof(nvmlEccSramErrorStatus_v1_t)},
        {"c_nvmlGpuFabricInfo_v3_t", sizeof(nvmlGpuFabricInfo_v3_t)},
        {"nvmlPciInfo_t", sizeof(nvmlPciInfo_t)},
        {"c_nvmlEventData_t", sizeof(nvmlEventData_t)},
        {"c_nvmlGpmMetric_t", sizeof(nvmlGpmMetric_t)},
        {"c_nvmlGpmMetricsGet_t", sizeof(nvmlGpmMetricsGet_t)},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (strcmp(sizes[i].name, type) == 0)
            return sizes[i].size;
    return 0;
}
