#include <utility>
#include <vector>

#include "base/error.h"
#include "engines/cuda/device_cache.h"

namespace dlm {
namespace {

class DeviceContext final : public Context {
 public:
  DeviceContext(HostEngine& engine, const CudaDevice& device, const CacheShape& shape,
                int32_t longest)
      : engine_(engine),
        device_(device),
        shape_(shape),
        longest_(longest),
        pointers_(shape.size()),
        stream_(nullptr, CudaDelete{&device.cuda()}),
        cache_(device.cuda(), shape) {
    const CudaDevice::Use use(device_);
    stream_ = create_stream(device_.cuda());
  }

  ~DeviceContext() override {
    const CudaDevice::Use use(device_, std::nothrow);
    memory_.reset();
    stream_.reset();
  }
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  void run(const Pass& wanted, CacheUse use, bool) override {
    Pass pass = wanted;
    if (use == CacheUse::write) make_room(pass.batch, pass.tokens);
    if (use == CacheUse::append) make_room_behind(pass.batch, pass.cached, pass.tokens);
    pointers_.put(pass, use != CacheUse::none && pass.cached > 0, keeps_rows(use));
    cache_.begin(pass, use);
    // Layers with a window keep the rows of all positions on a device.
    engine_.run(pass, {}, {pass.cached});
    cache_.end(pass, use);
  }

  // Waits until the copies are finished, because the engine uses other streams.
  void keep_outside(int32_t first, int32_t last) override {
    const CudaDevice::Use use(device_);
    cache_.keep_outside(first, last, stream_.get());
    device_.cuda().check(device_.cuda().cuStreamSynchronize(stream_.get()), "cuStreamSynchronize");
  }

  uint64_t cache_bytes() const override { return cache_.bytes(); }

 private:
  // Allocates `past` and `present`, each with room for one canvas per request. Frees the old memory
  // first.
  void make_room(int32_t batch, int32_t length) {
    const std::vector<size_t> offsets = offsets_of(batch, length);
    const CudaDevice::Use use(device_);
    if (memory_ == nullptr || memory_->bytes() < offsets.back()) {
      cache_.place({});
      memory_.reset();
      check_room(batch, length, offsets.back());
      memory_ =
          std::make_unique<CudaMemory>(device_.cuda(), CudaMemory::Kind::device, offsets.back());
    }
    capacity_ = length;
    cache_.place(places_in(*memory_, offsets));
    point();
  }

  // Makes room for `tokens` new rows after the `cached` rows of each head. The cached rows keep
  // their content.
  void make_room_behind(int32_t batch, int32_t cached, int32_t tokens) {
    const int32_t rows = cached + tokens;
    if (cached == 0) return make_room(batch, rows);
    if (rows <= capacity_) return;
    const int32_t most = grown(capacity_, rows, longest_);
    const std::vector<size_t> offsets = offsets_of(batch, most);
    const CudaDevice::Use use(device_);
    check_room(batch, most, offsets.back());
    auto memory =
        std::make_unique<CudaMemory>(device_.cuda(), CudaMemory::Kind::device, offsets.back());
    cache_.move(places_in(*memory, offsets), stream_.get());
    device_.cuda().check(device_.cuda().cuStreamSynchronize(stream_.get()), "cuStreamSynchronize");
    memory_ = std::move(memory);
    capacity_ = most;
    point();
  }

  std::vector<size_t> offsets_of(int32_t batch, int32_t rows) const {
    std::vector<size_t> parts;
    for (const CacheLayer& layer : shape_)
      parts.insert(parts.end(), 4, layer.tensor_bytes(batch, rows));
    return lay_out(parts);
  }

  std::vector<DeviceCache::Place> places_in(const CudaMemory& memory,
                                            const std::vector<size_t>& offsets) const {
    std::vector<DeviceCache::Place> places;
    for (size_t i = 0; i < 2 * shape_.size(); ++i)
      places.push_back({memory.device(offsets[2 * i]), memory.device(offsets[2 * i + 1])});
    return places;
  }

  void point() {
    for (size_t i = 0; i < cache_.places().size(); ++i) {
      const auto& [past, present] = cache_.places()[i];
      pointers_.set_past(i, pointer(past));
      pointers_.set_present(i, pointer(present));
    }
  }

  void check_room(int32_t batch, int32_t length, size_t needed) const {
    const CudaDevice::Memory memory = device_.memory();
    if (needed <= memory.free) return;
    size_t a_token = 0;
    for (const CacheLayer& layer : shape_) a_token += 4 * layer.tensor_bytes(batch, 1);
    // The size of each tensor is rounded up. `rounding` is an upper limit for the bytes that
    // rounding adds to all tensors together.
    const size_t rounding = 4 * shape_.size() * 256;
    const size_t fitting = memory.free < rounding ? 0 : (memory.free - rounding) / a_token;
    fail(DLM_OUT_OF_MEMORY,
         "the keys and values of %d canvas%s of %d tokens need %zu MiB of the device, but %zu of "
         "its %zu MiB are free: %s of %zu tokens would fit, or fewer at once (max_batch)",
         batch, batch == 1 ? "" : "es", length, in_mib(needed), in_mib(memory.free),
         in_mib(memory.total), batch == 1 ? "one" : "as many", fitting);
  }

  static void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

  HostEngine& engine_;
  const CudaDevice& device_;
  const CacheShape& shape_;  // belongs to the engine
  const int32_t longest_;
  int32_t capacity_ = 0;  // number of allocated rows per head in each tensor
  KeyValues pointers_;    // pointers to device memory
  CudaStream stream_;
  std::unique_ptr<CudaMemory> memory_;
  DeviceCache cache_;
};

}  // namespace

std::unique_ptr<Context> open_device_context(HostEngine& engine, const CudaDevice& device,
                                             const CacheShape& shape, int32_t longest) {
  return std::make_unique<DeviceContext>(engine, device, shape, longest);
}

}  // namespace dlm
