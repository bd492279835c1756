// The part of CUDA's driver API that the TensorRT engine uses: libcuda, opened at run time. Types and signatures are those
// of cuda.h, which also renames functions to their current versions (cuMemAlloc is cuMemAlloc_v2): so do the names below.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

namespace dlm {

#define DLM_CUDA_CALLS(CALL)                                                                                              \
  CALL(cuInit) CALL(cuGetErrorName) CALL(cuDeviceGetCount) CALL(cuDeviceGet) CALL(cuDeviceGetName)                        \
  CALL(cuDeviceGetAttribute) CALL(cuDevicePrimaryCtxRetain) CALL(cuDevicePrimaryCtxRelease) CALL(cuCtxPushCurrent)        \
  CALL(cuCtxPopCurrent) CALL(cuStreamCreate) CALL(cuStreamDestroy) CALL(cuStreamSynchronize) CALL(cuMemAlloc)             \
  CALL(cuMemFree) CALL(cuMemHostAlloc) CALL(cuMemFreeHost) CALL(cuMemcpyHtoDAsync) CALL(cuMemcpyDtoHAsync)                \
  CALL(cuMemcpy2DAsync) CALL(cuStreamBeginCapture) CALL(cuStreamEndCapture) CALL(cuGraphInstantiateWithFlags)             \
  CALL(cuGraphDestroy) CALL(cuGraphLaunch) CALL(cuGraphExecDestroy)

class Cuda {
 public:
  // Opens $DLM_CUDA_LIBRARY, or libcuda.so.1. Throws Error(DLM_ENGINE_MISSING).
  Cuda();

  // Throws Error(DLM_ENGINE_FAILED) with the call and the driver's name of the error.
  void check(CUresult result, const char* call) const;

#define DLM_CUDA_MEMBER(name) decltype(&::name) name = nullptr;
  DLM_CUDA_CALLS(DLM_CUDA_MEMBER)
#undef DLM_CUDA_MEMBER
};

// The first device and its primary context, which libraries over the CUDA runtime, as TensorRT is, use as well.
class CudaDevice {
 public:
  // Throws Error(DLM_ENGINE_MISSING) if there is no device.
  CudaDevice();
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  const Cuda& cuda() const { return cuda_; }
  int32_t sm() const { return sm_; }  // 89 = 8.9
  const std::string& name() const { return name_; }

  // Makes the device's context the thread's for as long as it lives; what the caller had there comes back.
  class Use {
   public:
    explicit Use(const CudaDevice& device) : cuda_(device.cuda_) {
      cuda_.check(cuda_.cuCtxPushCurrent(device.context_), "cuCtxPushCurrent");
    }
    // For destructors: a context that cannot be made current any more has lost what they free.
    Use(const CudaDevice& device, std::nothrow_t) noexcept
        : cuda_(device.cuda_), is_pushed_(cuda_.cuCtxPushCurrent(device.context_) == CUDA_SUCCESS) {}
    ~Use() {
      CUcontext ours = nullptr;
      if (is_pushed_) cuda_.cuCtxPopCurrent(&ours);
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    const Cuda& cuda_;
    bool is_pushed_ = true;
  };

 private:
  const Cuda cuda_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  int32_t sm_ = 0;
  std::string name_;
};

// What the driver gives and takes back; the device's context must be current for both.
struct CudaDelete {
  const Cuda* cuda;
  void operator()(CUstream_st* stream) const { cuda->cuStreamDestroy(stream); }
  void operator()(CUgraph_st* graph) const { cuda->cuGraphDestroy(graph); }
  void operator()(CUgraphExec_st* graph) const { cuda->cuGraphExecDestroy(graph); }
};
using CudaStream = std::unique_ptr<CUstream_st, CudaDelete>;
using CudaGraph = std::unique_ptr<CUgraph_st, CudaDelete>;
using CudaGraphExec = std::unique_ptr<CUgraphExec_st, CudaDelete>;

// One block of device memory, or of host memory that the device reads and writes by itself.
class CudaMemory {
 public:
  enum class Kind { device, pinned };
  CudaMemory(const Cuda& cuda, Kind kind, size_t bytes);
  ~CudaMemory();
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  CUdeviceptr device(size_t offset) const { return device_ + offset; }
  std::byte* host(size_t offset) const { return static_cast<std::byte*>(host_) + offset; }

 private:
  const Cuda& cuda_;
  CUdeviceptr device_ = 0;
  void* host_ = nullptr;
};

}  // namespace dlm
