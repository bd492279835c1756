// Declares and loads the part of CUDA's driver API (libcuda) that engines use. This file does not
// include CUDA's headers, because few build machines have them. The functions have the same names
// as in libcuda, and the types and values are the same as in cuda.h. If cuda.h is installed,
// tests/cuda_calls_check.cc compares this file with cuda.h. Enums are passed as int.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

// Opaque types of CUDA. They have the same names as in cuda.h, so that tests/cuda_calls_check.cc
// can compare signatures.
struct CUctx_st;
struct CUfunc_st;
struct CUgraph_st;
struct CUgraphExec_st;
struct CUmod_st;
struct CUstream_st;

namespace dlm {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = CUctx_st*;
using CUfunction = CUfunc_st*;
using CUgraph = CUgraph_st*;
using CUgraphExec = CUgraphExec_st*;
using CUmodule = CUmod_st*;
using CUstream = CUstream_st*;

constexpr CUresult CUDA_SUCCESS = 0, CUDA_ERROR_NO_DEVICE = 100;
constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
              CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76;
constexpr int CU_MEMORYTYPE_DEVICE = 2;
constexpr int CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1;
constexpr unsigned CU_STREAM_NON_BLOCKING = 1;

struct CUDA_MEMCPY2D {
  size_t srcXInBytes, srcY;
  int srcMemoryType;
  const void* srcHost;
  CUdeviceptr srcDevice;
  void* srcArray;
  size_t srcPitch, dstXInBytes, dstY;
  int dstMemoryType;
  void* dstHost;
  CUdeviceptr dstDevice;
  void* dstArray;
  size_t dstPitch, WidthInBytes, Height;
};

// clang-format off
#define DLM_CUDA_CALLS(CALL)                                        \
  CALL(cuInit, unsigned)                                            \
  CALL(cuGetErrorName, CUresult, const char**)                      \
  CALL(cuDeviceGetCount, int*)                                      \
  CALL(cuDeviceGet, CUdevice*, int)                                 \
  CALL(cuDeviceGetByPCIBusId, CUdevice*, const char*)               \
  CALL(cuDeviceGetName, char*, int, CUdevice)                       \
  CALL(cuDeviceGetAttribute, int*, int, CUdevice)                   \
  CALL(cuDevicePrimaryCtxRetain, CUcontext*, CUdevice)              \
  CALL(cuDevicePrimaryCtxRelease_v2, CUdevice)                      \
  CALL(cuCtxPushCurrent_v2, CUcontext)                              \
  CALL(cuCtxPopCurrent_v2, CUcontext*)                              \
  CALL(cuStreamCreate, CUstream*, unsigned)                         \
  CALL(cuStreamDestroy_v2, CUstream)                                \
  CALL(cuStreamSynchronize, CUstream)                               \
  CALL(cuMemGetInfo_v2, size_t*, size_t*)                           \
  CALL(cuMemAlloc_v2, CUdeviceptr*, size_t)                         \
  CALL(cuMemFree_v2, CUdeviceptr)                                   \
  CALL(cuMemHostAlloc, void**, size_t, unsigned)                    \
  CALL(cuMemFreeHost, void*)                                        \
  CALL(cuMemcpyHtoDAsync_v2, CUdeviceptr, const void*, size_t, CUstream) \
  CALL(cuMemcpyDtoHAsync_v2, void*, CUdeviceptr, size_t, CUstream)  \
  CALL(cuMemcpyDtoDAsync_v2, CUdeviceptr, CUdeviceptr, size_t, CUstream) \
  CALL(cuMemsetD8Async, CUdeviceptr, unsigned char, size_t, CUstream) \
  CALL(cuMemcpy2DAsync_v2, const CUDA_MEMCPY2D*, CUstream)          \
  CALL(cuStreamBeginCapture_v2, CUstream, int)                      \
  CALL(cuStreamEndCapture, CUstream, CUgraph*)                      \
  CALL(cuGraphInstantiateWithFlags, CUgraphExec*, CUgraph, unsigned long long) \
  CALL(cuGraphDestroy, CUgraph)                                     \
  CALL(cuGraphLaunch, CUgraphExec, CUstream)                        \
  CALL(cuGraphExecDestroy, CUgraphExec)                             \
  CALL(cuModuleLoadData, CUmodule*, const void*)                    \
  CALL(cuModuleGetFunction, CUfunction*, CUmodule, const char*)     \
  CALL(cuModuleUnload, CUmodule)                                    \
  CALL(cuLaunchKernel, CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
       unsigned, CUstream, void**, void**)
// clang-format on

class Cuda {
 public:
  // Loads the library that $DLM_CUDA_LIBRARY names. If the variable is not set, loads libcuda.so.1.
  // Throws an Error with status DLM_ENGINE_MISSING.
  Cuda();

  // Throws an Error with status DLM_ENGINE_FAILED if `result` is an error. The message contains the
  // name of the called function, and the driver's name for the error.
  void check(CUresult result, const char* call) const;

#define DLM_CUDA_MEMBER(name, ...) CUresult (*name)(__VA_ARGS__) = nullptr;
  DLM_CUDA_CALLS(DLM_CUDA_MEMBER)
#undef DLM_CUDA_MEMBER
};

// A CUDA device and its primary context, which TensorRT and ONNX Runtime use too.
class CudaDevice {
 public:
  // Throws an Error with status DLM_ENGINE_MISSING if the machine has no CUDA device, and an Error
  // with status DLM_INVALID_ARGUMENT if no device has this index.
  explicit CudaDevice(int index = 0);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  const Cuda& cuda() const { return cuda_; }
  int32_t sm() const { return sm_; }  // compute capability; 89 means 8.9
  const std::string& name() const { return name_; }
  // Returns true if this device has the address on the PCI bus, for example "0000:c1:00.0".
  bool is_at(const char* pci_bus_id) const {
    CUdevice found = 0;
    return cuda_.cuDeviceGetByPCIBusId(&found, pci_bus_id) == CUDA_SUCCESS && found == device_;
  }

  // While a Use object exists, the device's context is current in the thread that created the
  // object.
  class Use {
   public:
    explicit Use(const CudaDevice& device) : cuda_(device.cuda_) {
      cuda_.check(cuda_.cuCtxPushCurrent_v2(device.context_), "cuCtxPushCurrent");
    }
    // Use this constructor in destructors, because it does not throw. If it cannot make the context
    // current, CUDA has already freed the context's memory, so the destructor has nothing to free.
    Use(const CudaDevice& device, std::nothrow_t) noexcept
        : cuda_(device.cuda_),
          is_pushed_(cuda_.cuCtxPushCurrent_v2(device.context_) == CUDA_SUCCESS) {}
    ~Use() {
      CUcontext ours = nullptr;
      if (is_pushed_) cuda_.cuCtxPopCurrent_v2(&ours);
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    const Cuda& cuda_;
    bool is_pushed_ = true;
  };

  // Returns the free and the total device memory, in bytes. The device's context must be current.
  struct Memory {
    size_t free, total;
  };
  Memory memory() const;

 private:
  const Cuda cuda_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  int32_t sm_ = 0;
  std::string name_;
};

// Deletes an object of the CUDA driver. The device's context must be current when the object is
// created and when it is deleted.
struct CudaDelete {
  const Cuda* cuda;
  void operator()(CUstream_st* stream) const { cuda->cuStreamDestroy_v2(stream); }
  void operator()(CUgraph_st* graph) const { cuda->cuGraphDestroy(graph); }
  void operator()(CUgraphExec_st* graph) const { cuda->cuGraphExecDestroy(graph); }
};
using CudaStream = std::unique_ptr<CUstream_st, CudaDelete>;
using CudaGraph = std::unique_ptr<CUgraph_st, CudaDelete>;
using CudaGraphExec = std::unique_ptr<CUgraphExec_st, CudaDelete>;

// Returns a size in MiB for messages, rounded up.
inline size_t in_mib(size_t bytes) { return (bytes + (1 << 20) - 1) >> 20; }

// Queues copies of `count` parts of `bytes` bytes in device memory. The parts begin every
// `from_step` bytes, and are written every `to_step` bytes.
void copy_parts(const Cuda& cuda, CUdeviceptr from, size_t from_step, CUdeviceptr to,
                size_t to_step, size_t bytes, size_t count, CUstream stream);

// Creates a stream that does not wait for other streams, unlike the default stream. Throws the same
// errors as Cuda::check.
CudaStream create_stream(const Cuda& cuda);

// An allocation of device memory, or of host memory that the device can access directly.
class CudaMemory {
 public:
  enum class Kind { device, pinned };
  CudaMemory(const Cuda& cuda, Kind kind, size_t bytes);
  ~CudaMemory();
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  size_t bytes() const { return bytes_; }
  CUdeviceptr device(size_t offset) const { return device_ + offset; }
  std::byte* host(size_t offset) const { return static_cast<std::byte*>(host_) + offset; }

 private:
  const Cuda& cuda_;
  const size_t bytes_;
  CUdeviceptr device_ = 0;
  void* host_ = nullptr;
};

}  // namespace dlm
