#include "engines/cuda/cuda_api.h"

#include <dlfcn.h>

#include <type_traits>

#include "base/dynamic_library.h"
#include "base/error.h"
#include "base/one_line.h"

namespace dlm {
namespace {

constexpr char kAdvice[] =
    "Install NVIDIA's driver (a Jetson's comes with JetPack), set DLM_CUDA_LIBRARY to its "
    "libcuda.so.1, or run on the CPU: engine \"onnxruntime\", provider \"cpu\".";

}  // namespace

Cuda::Cuda() {
  std::string library;
  void* const handle = open_library(
      {"the CUDA driver", "DLM_CUDA_LIBRARY", {"libcuda.so.1"}, kAdvice}, "", &library);
  const auto load = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr)
      throw Error(
          DLM_ENGINE_MISSING,
          library + " has no " + name + ": it needs the driver of CUDA 11.4 or newer. " + kAdvice);
  };
#define DLM_CUDA_LOAD(name, ...) load(name, #name);
  DLM_CUDA_CALLS(DLM_CUDA_LOAD)
#undef DLM_CUDA_LOAD
}

void Cuda::check(CUresult result, const char* call) const {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  if (cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown error";
  fail(DLM_ENGINE_FAILED, "CUDA: %s failed: %s (%d)", call, name, static_cast<int>(result));
}

CudaDevice::CudaDevice(int index) {
  int count = 0;
  const CUresult started = cuda_.cuInit(0);
  if (started != CUDA_ERROR_NO_DEVICE) {
    cuda_.check(started, "cuInit");
    cuda_.check(cuda_.cuDeviceGetCount(&count), "cuDeviceGetCount");
  }
  if (count == 0)
    throw Error(DLM_ENGINE_MISSING,
                "the CUDA driver finds no device: $CUDA_VISIBLE_DEVICES may hide it; engine "
                "\"onnxruntime\" with provider \"cpu\" needs no device");
  if (index < 0 || index >= count)
    fail(DLM_INVALID_ARGUMENT, "device %d is not one of the %d that the CUDA driver finds (0..%d)",
         index, count, count - 1);
  cuda_.check(cuda_.cuDeviceGet(&device_, index), "cuDeviceGet");
  char name[256] = "";
  const auto ask = [&](int attribute) {
    int value = 0;
    cuda_.check(cuda_.cuDeviceGetAttribute(&value, attribute, device_), "cuDeviceGetAttribute");
    return value;
  };
  cuda_.check(cuda_.cuDeviceGetName(name, sizeof name, device_), "cuDeviceGetName");
  name_ = one_line(name);
  sm_ = 10 * ask(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
        ask(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  cuda_.check(cuda_.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

CudaDevice::~CudaDevice() { cuda_.cuDevicePrimaryCtxRelease_v2(device_); }

CudaDevice::Memory CudaDevice::memory() const {
  Memory memory{};
  cuda_.check(cuda_.cuMemGetInfo_v2(&memory.free, &memory.total), "cuMemGetInfo");
  return memory;
}

void copy_parts(const Cuda& cuda, CUdeviceptr from, size_t from_step, CUdeviceptr to,
                size_t to_step, size_t bytes, size_t count, CUstream stream) {
  CUDA_MEMCPY2D what{};
  what.srcMemoryType = what.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  what.srcDevice = from, what.dstDevice = to;
  what.srcPitch = from_step, what.dstPitch = to_step;
  what.WidthInBytes = bytes, what.Height = count;
  cuda.check(cuda.cuMemcpy2DAsync_v2(&what, stream), "cuMemcpy2DAsync");
}

CudaStream create_stream(const Cuda& cuda) {
  CUstream stream = nullptr;
  cuda.check(cuda.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  return CudaStream(stream, CudaDelete{&cuda});
}

CudaMemory::CudaMemory(const Cuda& cuda, Kind kind, size_t bytes) : cuda_(cuda), bytes_(bytes) {
  const bool is_device = kind == Kind::device;
  const CUresult result =
      is_device ? cuda_.cuMemAlloc_v2(&device_, bytes) : cuda_.cuMemHostAlloc(&host_, bytes, 0);
  const std::string call = std::string(is_device ? "cuMemAlloc" : "cuMemHostAlloc") + " of " +
                           std::to_string(bytes) + " bytes";
  cuda_.check(result, call.c_str());
}

CudaMemory::~CudaMemory() {
  if (device_ != 0) cuda_.cuMemFree_v2(device_);
  if (host_ != nullptr) cuda_.cuMemFreeHost(host_);
}

}  // namespace dlm
