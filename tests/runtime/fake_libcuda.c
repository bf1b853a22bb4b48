// A stand-in for libcuda.so.1 that launches nothing and writes down every call.  Streams are made up: 0 means the current
// context (that of device 0 unless another was pushed), n > 0 belongs to device n - 1.  Contexts are 0x1000 + device.
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { MAX_DEVICES = 4, MAX_PARAMETERS = 16, LOG_BYTES = 1 << 20 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char log_text[LOG_BYTES];
static size_t log_size;
static char failing[64];
static int failure;
static int capability[MAX_DEVICES][2];
static int parameter_count;
static size_t parameter_sizes[MAX_PARAMETERS];
static __thread uintptr_t current, pushed_over;

static void note(const char *format, ...) {
  pthread_mutex_lock(&mutex);
  va_list arguments;
  va_start(arguments, format);
  int wrote = vsnprintf(log_text + log_size, LOG_BYTES - log_size, format, arguments);
  va_end(arguments);
  if (wrote > 0 && log_size + (size_t)wrote < LOG_BYTES) log_size += (size_t)wrote;
  pthread_mutex_unlock(&mutex);
}

static int fails(const char *function) { return strcmp(function, failing) == 0 ? failure : 0; }
#define FAIL_IF_ASKED \
  if (fails(__func__)) return fails(__func__)

// ---- What tests call -------------------------------------------------------------------------------------------------
void fake_reset(void) {
  log_size = 0;
  log_text[0] = '\0';
  failing[0] = '\0';
  for (int i = 0; i < MAX_DEVICES; ++i) capability[i][0] = 9, capability[i][1] = 0;
  parameter_count = -1;
}
void fake_fail(const char *function, int result) {
  snprintf(failing, sizeof failing, "%s", function);
  failure = result;
}
void fake_capability(int device, int major, int minor) { capability[device][0] = major, capability[device][1] = minor; }
void fake_parameters(int count, const size_t *sizes) {
  parameter_count = count;
  for (int i = 0; i < count; ++i) parameter_sizes[i] = sizes[i];
}
const char *fake_log(void) { return log_text; }

// ---- The driver ------------------------------------------------------------------------------------------------------
int cuGetErrorName(int result, const char **text) {
  *text = result == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR_OF_THE_FAKE";
  return 0;
}
int cuGetErrorString(int result, const char **text) {
  (void)result;
  *text = "the fake was told to fail";
  return 0;
}
int cuDriverGetVersion(int *version) {
  *version = 12080;
  return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  FAIL_IF_ASKED;
  if (attribute != 75 && attribute != 76) return 1;
  *value = capability[device][attribute - 75];
  return 0;
}
int cuStreamGetCtx(uintptr_t stream, uintptr_t *context) {
  FAIL_IF_ASKED;
  *context = stream ? 0x1000 + stream - 1 : (current ? current : 0x1000);
  return 0;
}
int cuCtxGetCurrent(uintptr_t *context) {
  *context = current;
  return 0;
}
int cuCtxPushCurrent_v2(uintptr_t context) {
  pushed_over = current;
  current = context;
  note("cuCtxPushCurrent device=%d\n", (int)(context - 0x1000));
  return 0;
}
int cuCtxPopCurrent_v2(uintptr_t *context) {
  *context = current;
  current = pushed_over;
  note("cuCtxPopCurrent\n");
  return 0;
}
int cuCtxGetDevice(int *device) {
  if (!current) return 201;
  *device = (int)(current - 0x1000);
  return 0;
}
int cuLibraryLoadData(void **library, const void *code, int *a, void **b, unsigned c, int *d, void **e, unsigned f) {
  (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
  // The length is in the ELF header: what the later of its two tables ends at.
  const unsigned char *image = (const unsigned char *)code;
  uint64_t programs, sections, bytes = 64, sum = 0;
  uint16_t counts[4];
  memcpy(&programs, image + 32, 8), memcpy(&sections, image + 40, 8), memcpy(counts, image + 54, 8);
  programs += (uint64_t)counts[0] * counts[1], sections += (uint64_t)counts[2] * counts[3];
  bytes = programs > bytes ? programs : bytes;
  bytes = sections > bytes ? sections : bytes;
  for (uint64_t i = 0; i < bytes; ++i) sum += (i + 1) * image[i];
  note("cuLibraryLoadData bytes=%lu sum=%lu\n", (unsigned long)bytes, (unsigned long)sum);
  FAIL_IF_ASKED;
  *library = (void *)0x10;
  return 0;
}
int cuLibraryUnload(void *library) {
  note("cuLibraryUnload library=%p\n", library);
  return 0;
}
int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
  (void)library;
  note("cuLibraryGetKernel name=%s\n", name);
  FAIL_IF_ASKED;
  *kernel = (void *)0x20;
  return 0;
}
int cuKernelGetFunction(void **function, void *kernel) {
  (void)kernel;
  note("cuKernelGetFunction device=%d\n", (int)(current - 0x1000));
  *function = (void *)0x30;
  return 0;
}
int cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
  (void)kernel;
  note("cuKernelSetAttribute attribute=%d value=%d device=%d\n", attribute, value, device);
  FAIL_IF_ASKED;
  return 0;
}
int cuKernelGetParamInfo(void *kernel, size_t index, size_t *offset, size_t *size) {
  (void)kernel;
  if (parameter_count < 0) return 801;
  if (index >= (size_t)parameter_count) return 1;
  *offset = 0;
  *size = parameter_sizes[index];
  return 0;
}
int cuTensorMapEncodeTiled(uint64_t *map, int dtype, uint32_t rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides, int interleave,
                           int swizzle, int promotion, int fill) {
  FAIL_IF_ASKED;
  if ((uintptr_t)map % 64) return 1;
  char text[5][256] = {{0}};
  for (uint32_t i = 0; i < rank; ++i) {
    sprintf(text[0] + strlen(text[0]), i ? ",%lu" : "%lu", (unsigned long)dims[i]);
    if (i + 1 < rank) sprintf(text[1] + strlen(text[1]), i ? ",%lu" : "%lu", (unsigned long)strides[i]);
    sprintf(text[2] + strlen(text[2]), i ? ",%u" : "%u", box[i]);
    sprintf(text[3] + strlen(text[3]), i ? ",%u" : "%u", element_strides[i]);
  }
  note("cuTensorMapEncodeTiled dtype=%d address=%lx dims=%s strides=%s box=%s element_strides=%s interleave=%d "
       "swizzle=%d promotion=%d fill=%d\n",
       dtype, (unsigned long)(uintptr_t)address, text[0], text[1], text[2], text[3], interleave, swizzle, promotion, fill);
  memset(map, 0, 128);
  map[0] = (uintptr_t)address;  // so that a launch shows which map it was given
  return 0;
}
struct config {
  unsigned grid[3], block[3], shared_bytes;
  uintptr_t stream;
  struct {
    int id;
    int padding;
    unsigned value[16];
  } *attributes;
  unsigned attribute_count;
};
int cuLaunchKernelEx(const struct config *config, void *function, void **parameters, void **extra) {
  (void)extra;
  if (function != (void *)0x20) return 400;
  char cluster[64] = "none", values[2048] = "";
  unsigned early = 0;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    const unsigned *value = config->attributes[i].value;
    if (config->attributes[i].id == 4) sprintf(cluster, "%u,%u,%u", value[0], value[1], value[2]);
    if (config->attributes[i].id == 6) early = value[0];
  }
  for (int i = 0; i < parameter_count; ++i) {
    sprintf(values + strlen(values), "%s", i ? "," : "");
    // Of a tensor map, the first eight bytes; see above.
    for (size_t j = 0; j < parameter_sizes[i] && j < 8; ++j) {
      sprintf(values + strlen(values), "%02x", ((unsigned char *)parameters[i])[j]);
    }
  }
  note("cuLaunchKernelEx grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%lu cluster=%s early=%u parameters=%s\n", config->grid[0],
       config->grid[1], config->grid[2], config->block[0], config->block[1], config->block[2], config->shared_bytes,
       (unsigned long)config->stream, cluster, early, values);
  FAIL_IF_ASKED;
  return 0;
}
