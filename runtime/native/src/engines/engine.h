// The seam between the loop and whatever runs the denoiser.
//
// An Engine holds the weights and is shared by threads. Each session opens a Context on it, which
// owns the session's buffers and its cache of keys and values, wherever the engine wants them: the
// loop says what a pass shall do with the cache and never sees the bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/segment.h"
#include "dlm_runtime.h"

namespace dlm {

// A layer's keys (or values) are [B, kv_heads, rows, head_size], with a scale after each int8 row.
struct CacheLayer {
  int32_t kv_heads, head_size, element_bytes, scale_bytes = 0;

  size_t row_bytes() const {
    return static_cast<size_t>(head_size) * static_cast<size_t>(element_bytes) +
           static_cast<size_t>(scale_bytes);
  }
  size_t tensor_bytes(int32_t batch, int32_t rows) const {
    return static_cast<size_t>(batch) * static_cast<size_t>(kv_heads) * static_cast<size_t>(rows) *
           row_bytes();
  }
};

// Every layer has its own.
using CacheShape = std::vector<CacheLayer>;

// What the loop knows of a denoiser, checked.
struct Denoiser {
  int32_t vocab_size, mask_token_id, max_canvas_length, top_k, shift;
  bool has_cache;
  CacheShape cache;  // at least one layer, and of no use where there is none
  std::vector<int32_t> eos_token_ids;
  int32_t visible_block = 0;     // 0: attention is full
  int32_t max_new_tokens = 128;  // of a request that does not say

  bool is_end(int32_t token) const {
    return std::find(eos_token_ids.begin(), eos_token_ids.end(), token) != eos_token_ids.end();
  }
};

// What a pass does with the cache of its context.
enum class CacheUse {
  none,   // nothing: S is 0, and the T new rows are of no use
  write,  // S is 0; the T new rows are kept for keep_outside, and all others forgotten, B with them
  read,   // over the S rows that keep_outside kept
  refresh,  // over them as well, and the T new rows are kept with them
  append    // over positions [0, S), none or kept; the T new rows are kept behind them, no others
};

// True if the new rows are kept.
constexpr bool keeps_rows(CacheUse use) { return use != CacheUse::none && use != CacheUse::read; }

class Context {
 public:
  virtual ~Context() = default;

  // Runs one pass over positions that follow each other, the same for each request of a batch. The
  // caller sets everything of it but `layers` and the keys and values, which are the context's.
  // Throws Error(DLM_ENGINE_FAILED) or whatever else ends the request.
  virtual void run(const dlm_pass& pass, CacheUse use) = 0;

  // Makes the rows of the positions outside [first, last) what the next passes read, in any order,
  // as keys are encoded with their positions. They were kept, or are the last pass's.
  virtual void keep_outside(int32_t first, int32_t last) = 0;

  // Bytes of the batch's keys and values now: of the canvas, or of what was appended.
  virtual uint64_t cache_bytes() const = 0;
};

class Arena;

class Engine {
 public:
  virtual ~Engine() = default;

  // A context of this engine, which must outlive it; one thread at a time uses it. `longest`: rows
  // that an appended cache has room for at most, the denoiser's max_canvas_length.
  virtual std::unique_ptr<Context> open_context(int32_t longest) = 0;

  // True if requests may share a pass as segments of a row of tokens. If not, they go in lockstep.
  virtual bool takes_segments() const { return false; }

  // `rows` rows of keys and values for requests that do, else NULL. The engine must outlive it.
  virtual std::unique_ptr<Arena> open_arena(int64_t rows);

  // One line for people: name, version, provider.
  virtual std::string description() const = 0;

  // How many rows a pass of T `tokens` over S `cached` ones may score; 0: it takes no such pass.
  virtual int32_t max_rows(int32_t /*tokens*/, int32_t /*cached*/) const { return INT32_MAX; }

  // How many requests a pass may have (B).
  virtual int32_t max_batch() const { return INT32_MAX; }

  // The sizes behind max_rows, for people; "" where there is no limit.
  virtual std::string limits() const { return ""; }
};

// An engine that is told in dlm_pass where everything of a pass is. Its contexts keep the cache,
// and point the pass at it: in host memory, unless the engine opens others.
class HostEngine : public Engine {
 public:
  explicit HostEngine(CacheShape cache) : cache_(std::move(cache)) {}

  std::unique_ptr<Context> open_context(int32_t longest) override;
  std::unique_ptr<Arena> open_arena(int64_t rows) override;

  // Runs a pass with all of dlm_pass set; called by several contexts at once. segments: of its
  // tokens, with B = 1 and S = all rows; none if the requests are those of B.
  virtual void run(const dlm_pass& pass, const std::vector<Segment>& segments) = 0;

 protected:
  const CacheShape& cache() const { return cache_; }

 private:
  const CacheShape cache_;
};

// What a graph calls the inputs and outputs of a pass.
struct PortNames {
  struct Layer {
    std::string past_key, past_value, present_key, present_value;
  };
  std::string input_ids, position_ids, score_rows, top_token, top_prob, entropy, logits;
  std::string segments{};  // "": the graph has none
  std::vector<Layer> layers{};
};

// What an engine must know of a bundle's graph; the manifest says it.
struct GraphSpec {
  std::string path;         // of denoiser.onnx
  std::string device_path;  // of device.onnx, the same graph for GPUs; empty if there is none
  int32_t vocab_size, top_k;
  CacheShape cache;
  int32_t cache_type;  // an element type of engines/graph_contract.h
  bool simulated;   // quantised values are computed on in floating point, as the graph is written
  PortNames ports;  // as many layers as cache
};

// The smallest, the best and the largest of a size, as an engine's profile has them.
struct Sizes {
  int32_t smallest, best, largest;
};

// The passes that one profile of a TensorRT engine takes.
struct Profile {
  Sizes tokens, cached, rows;
};

// A compute capability as people write it: 89 as "8.9".
inline std::string sm_text(int32_t sm) {
  return std::to_string(sm / 10) + "." + std::to_string(sm % 10);
}

// One of a bundle's TensorRT engines; the manifest says it.
struct EngineSpec {
  std::string target, path, builder, version;  // builder: "tensorrt" or "tensorrt_rtx"
  std::string bundle;                          // the folder that it lies in, for messages
  std::vector<int32_t> sm;                     // compute capabilities that it runs on, 89 = 8.9
  Profile prefill, block;                      // profiles 0 and 1
};

// Which of ONNX Runtime's providers runs the graph, as dlm_open_options has it.
struct ProviderChoice {
  std::string name = "cpu";
  int32_t device = 0;
  bool allow_fallback = false;

  bool is_gpu() const { return name != "cpu"; }
};

// Loads libonnxruntime (library, or the places that dlm_open_options names) and the graph; threads
// = 0: all cores. Throws Error(DLM_ENGINE_MISSING) without the library, its provider or what that
// needs, Error(DLM_UNSUPPORTED) if the provider leaves nodes to the CPU that it may not.
std::unique_ptr<Engine> open_onnxruntime(const GraphSpec& graph, const std::string& library,
                                         int threads, const ProviderChoice& provider);

// Loads TensorRT (library, or the places that dlm_open_options names) and the engine that fits it
// and the device. Throws Error(DLM_ENGINE_MISSING), or Error(DLM_UNSUPPORTED) if none fits.
std::unique_ptr<Engine> open_tensorrt(const GraphSpec& graph,
                                      const std::vector<EngineSpec>& engines,
                                      const std::string& library);

// A row with a logit of NaN or +infinity gets a probability of NaN, which ends its request.
std::unique_ptr<HostEngine> make_callback(dlm_pass_fn run, void* user, const Denoiser& denoiser);

// For bundles that are opened to be looked at: every pass is refused with Error(DLM_UNSUPPORTED).
std::unique_ptr<Engine> make_none(CacheShape cache);

}  // namespace dlm
