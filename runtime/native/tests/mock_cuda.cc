// A mock of libcuda.so.1, for machines without CUDA. The mock is stricter than a real device. The
// host faults if it reads a device pointer. The mock checks every range of memory. It runs the
// queued work of a stream only when a caller waits for the stream. Calls without a current context
// fail.
//
// Environment variables configure the mock. $MOCK_CUDA_SM is the compute capability of the devices
// (default 120, which means 12.0). $MOCK_CUDA_DEVICES is the number of devices (default 1).
// $MOCK_CUDA_BYTES is the memory of each device (default 1 GiB). $MOCK_CUDA_FAIL lists the calls
// that fail.
//
// The library is also a mock of libnvrtc.so. The kernel that the mock launches is the runtime's
// kernel for draws, compiled for the host.
#include "mock_cuda.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "engines/cuda/draw_kernel.h"

struct CUgraph_st {
  std::vector<std::function<void()>> work;
};
struct CUgraphExec_st : CUgraph_st {};
struct CUmod_st {};
struct CUstream_st {
  std::vector<std::function<void()>> pending;
  CUgraph capturing = nullptr;
};

namespace {

// This bit is set in device addresses, so that the processor faults if the host reads them.
constexpr CUdeviceptr kDeviceBit = CUdeviceptr{1} << 62;
constexpr size_t kGuardBytes = 64;
constexpr unsigned char kGuard = 0xD7;

struct State {
  std::mutex mutex;
  std::map<std::string, int> counts;
  std::map<uintptr_t, size_t> device, pinned;  // from the address of each memory block to its size
  std::set<const void*> objects;
  int retained = 0;
};

State& state() {
  static State* const all = new State;  // This object is never destroyed, because the libraries
                                        // that use it are unloaded in any order
  return *all;
}

thread_local std::vector<CUcontext> current;
CUcontext const kContext = reinterpret_cast<CUcontext>(0x1234);

const char* variable(const char* name, const char* fallback) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : fallback;
}

size_t device_bytes() {
  return static_cast<size_t>(std::atoll(variable("MOCK_CUDA_BYTES", "1073741824")));
}

// The code that the mock of NVRTC makes for the devices.
std::string code() { return std::string("mock code for SM ") + variable("MOCK_CUDA_SM", "120"); }

void add(const std::string& count) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  ++state().counts[count];
}

bool is_inside(const std::map<uintptr_t, size_t>& blocks, uintptr_t start, size_t bytes) {
  const auto next = blocks.upper_bound(start);
  if (next == blocks.begin()) return false;
  const auto& [from, size] = *std::prev(next);
  return start - from <= size && bytes <= size - (start - from);
}

bool is_pinned(const void* host, size_t bytes) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return is_inside(state().pinned, reinterpret_cast<uintptr_t>(host), bytes);
}

template <class Object>
Object* remember(Object* object) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().objects.insert(object);
  return object;
}

template <class Object>
CUresult forget(Object* object) {
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    if (state().objects.erase(object) == 0) return CUDA_ERROR_INVALID_HANDLE;
  }
  delete object;
  return CUDA_SUCCESS;
}

void drain(CUstream stream) {
  for (const auto& work : stream->pending) work();
  stream->pending.clear();
}

// Allocates a block with guard bytes on both sides. The mock checks the guard bytes when the block
// is freed.
void* allocate(std::map<uintptr_t, size_t> State::* blocks, size_t bytes) {
  auto* const raw = static_cast<unsigned char*>(std::malloc(bytes + 2 * kGuardBytes));
  std::memset(raw, kGuard, bytes + 2 * kGuardBytes);
  std::memset(raw + kGuardBytes, 0xCC, bytes);
  const std::lock_guard<std::mutex> lock(state().mutex);
  (state().*blocks)[reinterpret_cast<uintptr_t>(raw + kGuardBytes)] = bytes;
  return raw + kGuardBytes;
}

CUresult release(std::map<uintptr_t, size_t> State::* blocks, uintptr_t start) {
  size_t bytes = 0;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    const auto found = (state().*blocks).find(start);
    if (found == (state().*blocks).end()) return CUDA_ERROR_INVALID_VALUE;
    bytes = found->second;
    (state().*blocks).erase(found);
  }
  auto* const raw = reinterpret_cast<unsigned char*>(start) - kGuardBytes;
  for (size_t i = 0; i < kGuardBytes; ++i)
    if (raw[i] != kGuard || raw[kGuardBytes + bytes + i] != kGuard) {
      add("bad_access");
      break;
    }
  std::free(raw);
  return CUDA_SUCCESS;
}

}  // namespace

namespace mock {

bool note(const std::string& call) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  const int number = ++state().counts[call];
  const std::string wanted = std::string(",") + variable("MOCK_CUDA_FAIL", "") + ",";
  const auto asks = [&](const std::string& which) {
    return wanted.find("," + call + ":" + which + ",") != std::string::npos;
  };
  return asks("*") || asks(std::to_string(number));
}

std::string counts() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  std::string text;
  for (const auto& [call, number] : state().counts)
    text += (text.empty() ? "" : " ") + call + "=" + std::to_string(number);
  return text;
}

int live() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return static_cast<int>(state().device.size() + state().pinned.size() + state().objects.size()) +
         state().retained;
}

void* view(CUdeviceptr address, size_t bytes) {
  const auto host = static_cast<uintptr_t>(address & ~kDeviceBit);
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    if ((address & kDeviceBit) != 0 && is_inside(state().device, host, bytes))
      return reinterpret_cast<void*>(host);
  }
  add("bad_access");
  return nullptr;
}

bool is_capturing(CUstream stream) { return stream->capturing != nullptr; }

void submit(CUstream stream, const std::function<void()>& work) {
  (stream->capturing != nullptr ? stream->capturing->work : stream->pending).push_back(work);
}

}  // namespace mock

// CALL_ANYWHERE counts the call, and makes the call fail if $MOCK_CUDA_FAIL lists it. CALL does the
// same, but fails first if no context is current.
#define CALL_ANYWHERE(name, failure) \
  if (mock::note(#name)) return failure
#define CALL(name, failure)                               \
  if (current.empty()) return CUDA_ERROR_INVALID_CONTEXT; \
  if (mock::note(#name)) return failure

extern "C" {

CUresult cuInit(unsigned) {
  CALL_ANYWHERE(cuInit, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
  return std::atoi(variable("MOCK_CUDA_DEVICES", "1")) > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  switch (error) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      return CUDA_SUCCESS;
    case CUDA_ERROR_LAUNCH_FAILED:
      *name = "CUDA_ERROR_LAUNCH_FAILED";
      return CUDA_SUCCESS;
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
      *name = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH";
      return CUDA_SUCCESS;
    default:
      *name = nullptr;
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuDeviceGetCount(int* count) {
  *count = std::atoi(variable("MOCK_CUDA_DEVICES", "1"));
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice* device, const char* address) {
  unsigned bus = 0;
  if (std::sscanf(address, "0000:%x:00.0", &bus) != 1) return CUDA_ERROR_INVALID_VALUE;
  *device = static_cast<CUdevice>(bus);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int capacity, CUdevice) {
  std::strncpy(name, "Mock GPU", static_cast<size_t>(capacity));
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  const int sm = std::atoi(variable("MOCK_CUDA_SM", "120"));
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? sm / 10 : sm % 10;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  CALL_ANYWHERE(cuDevicePrimaryCtxRetain, CUDA_ERROR_OUT_OF_MEMORY);
  const std::lock_guard<std::mutex> lock(state().mutex);
  ++state().retained;
  *context = kContext;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  --state().retained;
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
  CALL_ANYWHERE(cuCtxPushCurrent, CUDA_ERROR_LAUNCH_FAILED);
  current.push_back(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext* context) {
  if (current.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = current.back();
  current.pop_back();
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* stream, unsigned) {
  CALL(cuStreamCreate, CUDA_ERROR_OUT_OF_MEMORY);
  *stream = remember(new CUstream_st);
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream) {
  CALL(cuStreamDestroy, CUDA_ERROR_LAUNCH_FAILED);
  drain(stream);
  return forget(stream);
}

CUresult cuStreamSynchronize(CUstream stream) {
  CALL(cuStreamSynchronize, CUDA_ERROR_LAUNCH_FAILED);
  if (stream->capturing != nullptr) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  drain(stream);
  return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(size_t* free, size_t* total) {
  CALL(cuMemGetInfo, CUDA_ERROR_LAUNCH_FAILED);
  *free = *total = device_bytes();
  const std::lock_guard<std::mutex> lock(state().mutex);
  for (const auto& [start, bytes] : state().device) *free -= bytes;
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  CALL(cuMemAlloc, CUDA_ERROR_OUT_OF_MEMORY);
  *address = reinterpret_cast<CUdeviceptr>(allocate(&State::device, bytes)) | kDeviceBit;
  return CUDA_SUCCESS;
}

CUresult cuMemFree(CUdeviceptr address) {
  CALL(cuMemFree, CUDA_ERROR_LAUNCH_FAILED);
  return release(&State::device, static_cast<uintptr_t>(address & ~kDeviceBit));
}

CUresult cuMemHostAlloc(void** host, size_t bytes, unsigned) {
  CALL(cuMemHostAlloc, CUDA_ERROR_OUT_OF_MEMORY);
  *host = allocate(&State::pinned, bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void* host) {
  CALL(cuMemFreeHost, CUDA_ERROR_LAUNCH_FAILED);
  return release(&State::pinned, reinterpret_cast<uintptr_t>(host));
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  CALL(cuMemcpyHtoDAsync, CUDA_ERROR_LAUNCH_FAILED);
  void* const device = mock::view(to, bytes);
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (is_pinned(from, bytes)) {
    mock::submit(stream, [=] { std::memcpy(device, from, bytes); });
    return CUDA_SUCCESS;
  }
  if (stream->capturing != nullptr) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  add("pageable_copies");
  drain(stream);
  std::memcpy(device, from, bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  CALL(cuMemcpyDtoHAsync, CUDA_ERROR_LAUNCH_FAILED);
  const void* const device = mock::view(from, bytes);
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (is_pinned(to, bytes)) {
    mock::submit(stream, [=] { std::memcpy(to, device, bytes); });
    return CUDA_SUCCESS;
  }
  if (stream->capturing != nullptr) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  add("pageable_copies");
  drain(stream);
  std::memcpy(to, device, bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  CALL(cuMemcpyDtoDAsync, CUDA_ERROR_LAUNCH_FAILED);
  void* const target = mock::view(to, bytes);
  const void* const source = mock::view(from, bytes);
  if (target == nullptr || source == nullptr) return CUDA_ERROR_INVALID_VALUE;
  mock::submit(stream, [=] { std::memcpy(target, source, bytes); });
  return CUDA_SUCCESS;
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  CALL(cuMemsetD8Async, CUDA_ERROR_LAUNCH_FAILED);
  void* const target = mock::view(to, bytes);
  if (target == nullptr) return CUDA_ERROR_INVALID_VALUE;
  mock::submit(stream, [=] { std::memset(target, value, bytes); });
  return CUDA_SUCCESS;
}

CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D* copy, CUstream stream) {
  CALL(cuMemcpy2DAsync, CUDA_ERROR_LAUNCH_FAILED);
  const CUDA_MEMCPY2D what = *copy;
  if (what.srcMemoryType != CU_MEMORYTYPE_DEVICE || what.dstMemoryType != CU_MEMORYTYPE_DEVICE ||
      what.Height == 0 || what.WidthInBytes > what.srcPitch || what.WidthInBytes > what.dstPitch)
    return CUDA_ERROR_INVALID_VALUE;
  const auto* const from = static_cast<char*>(
      mock::view(what.srcDevice, (what.Height - 1) * what.srcPitch + what.WidthInBytes));
  auto* const to = static_cast<char*>(
      mock::view(what.dstDevice, (what.Height - 1) * what.dstPitch + what.WidthInBytes));
  if (from == nullptr || to == nullptr) return CUDA_ERROR_INVALID_VALUE;
  mock::submit(stream, [=] {
    for (size_t row = 0; row < what.Height; ++row)
      std::memcpy(to + row * what.dstPitch, from + row * what.srcPitch, what.WidthInBytes);
  });
  return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  CALL(cuStreamBeginCapture, CUDA_ERROR_LAUNCH_FAILED);
  if (stream->capturing != nullptr || mode != CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    return CUDA_ERROR_INVALID_VALUE;
  stream->capturing = remember(new CUgraph_st);
  return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  *graph = std::exchange(stream->capturing, nullptr);
  if (*graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!mock::note("cuStreamEndCapture")) return CUDA_SUCCESS;
  forget(std::exchange(*graph, nullptr));
  return CUDA_ERROR_LAUNCH_FAILED;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* ready, CUgraph graph, unsigned long long) {
  CALL(cuGraphInstantiateWithFlags, CUDA_ERROR_OUT_OF_MEMORY);
  auto* const copy = new CUgraphExec_st;
  copy->work = graph->work;
  *ready = remember(copy);
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) {
  CALL(cuGraphDestroy, CUDA_ERROR_LAUNCH_FAILED);
  return forget(graph);
}

CUresult cuGraphExecDestroy(CUgraphExec graph) {
  CALL(cuGraphExecDestroy, CUDA_ERROR_LAUNCH_FAILED);
  return forget(graph);
}

CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream) {
  CALL(cuGraphLaunch, CUDA_ERROR_LAUNCH_FAILED);
  for (const auto& work : graph->work) mock::submit(stream, work);
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  CALL(cuModuleLoadData, CUDA_ERROR_OUT_OF_MEMORY);
  if (static_cast<const char*>(image) != code()) return CUDA_ERROR_INVALID_IMAGE;
  *module = remember(new CUmod_st);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  CALL(cuModuleGetFunction, CUDA_ERROR_NOT_FOUND);
  if (std::string(name) != "dlm_draw") return CUDA_ERROR_NOT_FOUND;
  *function = reinterpret_cast<CUfunction>(module);
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
  CALL(cuModuleUnload, CUDA_ERROR_LAUNCH_FAILED);
  return forget(module);
}

CUresult cuLaunchKernel(CUfunction, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned,
                        unsigned, unsigned, CUstream stream, void** parameters, void**) {
  CALL(cuLaunchKernel, CUDA_ERROR_LAUNCH_FAILED);
  if (threads != dlm::draw_kernel::kThreads) return CUDA_ERROR_INVALID_VALUE;
  dlm::draw_kernel::Arguments given;
  std::memcpy(&given, parameters[0], sizeof given);
  bool is_inside = true;
  const auto view = [&](auto*& array, size_t count) {
    void* const host = mock::view(reinterpret_cast<CUdeviceptr>(array),
                                  std::max<size_t>(count * sizeof *array, 1));
    is_inside = is_inside && host != nullptr;
    array = static_cast<std::remove_reference_t<decltype(array)>>(host);
  };
  const size_t rows = blocks, candidates = rows * static_cast<size_t>(given.top_k);
  view(given.logits, rows * static_cast<size_t>(given.vocab_size));
  view(given.rows, rows), view(given.drawn, rows), view(given.entropy, rows);
  view(given.unused, 2 * static_cast<size_t>(given.unused_count));
  view(given.tokens, candidates), view(given.probs, candidates), view(given.log_odds, candidates);
  if (!is_inside) return CUDA_ERROR_ILLEGAL_ADDRESS;
  mock::submit(stream, [=] {
    const auto block = std::make_unique<dlm::draw_kernel::Block>();
    for (unsigned row = 0; row < blocks; ++row)
      dlm::draw_kernel::Row(*block, given, static_cast<int32_t>(row)).run();
  });
  return CUDA_SUCCESS;
}

// ---- NVRTC ----

// A program is the text of its source.
using Program = std::string*;

int nvrtcCreateProgram(Program* program, const char* source, const char*, int, const char* const*,
                       const char* const*) {
  *program = new std::string(source);
  return 0;
}

int nvrtcCompileProgram(Program program, int count, const char* const* options) {
  if (mock::note("nvrtcCompileProgram")) return 6;
  const std::string wanted =
      std::string("--gpu-architecture=sm_") + variable("MOCK_CUDA_SM", "120");
  const bool is_right = std::find(options, options + count, wanted) != options + count &&
                        program->find("dlm_draw(") != std::string::npos;
  return is_right ? 0 : 6;
}

int nvrtcGetCUBINSize(Program, size_t* bytes) {
  *bytes = code().size() + 1;
  return 0;
}

int nvrtcGetCUBIN(Program, char* to) {
  std::strcpy(to, code().c_str());
  return 0;
}

int nvrtcGetProgramLogSize(Program, size_t* bytes) {
  *bytes = sizeof "the kernel is bad";
  return 0;
}

int nvrtcGetProgramLog(Program, char* to) {
  std::strcpy(to, "the kernel is bad");
  return 0;
}

int nvrtcDestroyProgram(Program* program) {
  delete *program;
  return 0;
}

}  // extern "C"
