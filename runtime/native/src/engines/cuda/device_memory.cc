#include "engines/cuda/device_memory.h"

#include "base/error.h"

namespace dlm {
namespace {

CUdeviceptr place(const std::byte* address) { return reinterpret_cast<CUdeviceptr>(address); }

class DeviceMemory final : public RowMemory {
 public:
  explicit DeviceMemory(const CudaDevice& device)
      : device_(device), cuda_(device.cuda()), stream_(nullptr, CudaDelete{&cuda_}) {
    const CudaDevice::Use use(device_);
    stream_ = create_stream(cuda_);
  }

  ~DeviceMemory() override {
    const CudaDevice::Use use(device_, std::nothrow);
    stream_.reset();
  }

  Block allocate(size_t bytes) override {
    const CudaDevice::Use use(device_);
    const CudaDevice::Memory memory = device_.memory();
    if (bytes > memory.free)
      fail(DLM_OUT_OF_MEMORY,
           "the keys and values of requests that share passes need %zu MiB of the device, but %zu "
           "of its %zu MiB are free: set a smaller cache_bytes of the scheduler",
           in_mib(bytes), in_mib(memory.free), in_mib(memory.total));
    auto made = std::make_shared<CudaMemory>(cuda_, CudaMemory::Kind::device, bytes);
    cuda_.check(cuda_.cuMemsetD8Async(made->device(0), 0, bytes, stream_.get()), "cuMemsetD8Async");
    wait();
    auto* const address = reinterpret_cast<std::byte*>(made->device(0));
    return {address, [made = std::move(made), this](std::byte*) mutable {
              const CudaDevice::Use use(device_, std::nothrow);
              cuda_.cuStreamSynchronize(stream_.get());  // copies may still use the memory
              made.reset();
            }};
  }

  void copy(const std::byte* from, size_t from_step, std::byte* to, size_t to_step, size_t bytes,
            size_t count) override {
    const CudaDevice::Use use(device_);
    copy_parts(cuda_, place(from), from_step, place(to), to_step, bytes, count, stream_.get());
  }

  void read(const std::byte* from, std::byte* host, size_t bytes) override {
    const CudaDevice::Use use(device_);
    cuda_.check(cuda_.cuMemcpyDtoHAsync_v2(host, place(from), bytes, stream_.get()),
                "cuMemcpyDtoHAsync");
    wait();
  }

  void write(const std::byte* host, std::byte* to, size_t bytes) override {
    const CudaDevice::Use use(device_);
    cuda_.check(cuda_.cuMemcpyHtoDAsync_v2(place(to), host, bytes, stream_.get()),
                "cuMemcpyHtoDAsync");
  }

  void finish() override {
    const CudaDevice::Use use(device_);
    wait();
  }

 private:
  void wait() { cuda_.check(cuda_.cuStreamSynchronize(stream_.get()), "cuStreamSynchronize"); }

  const CudaDevice& device_;
  const Cuda& cuda_;
  CudaStream stream_;
};

}  // namespace

std::unique_ptr<RowMemory> make_device_memory(const CudaDevice& device) {
  return std::make_unique<DeviceMemory>(device);
}

}  // namespace dlm
