#include "api/prompt_cache.h"

#include <memory>
#include <vector>

#include "cache/arena.h"
#include "decode/save_prompt.h"

namespace dlm {
namespace {

PromptCacheFormat format_of(const dlm_bundle& bundle) {
  const Denoiser& denoiser = bundle.manifest.denoiser;
  if (!denoiser.splits_prompts())
    fail(DLM_UNSUPPORTED,
         "this denoiser has full attention%s, so the keys and values of a prompt depend on later "
         "tokens: only denoisers with block-causal attention can have a prompt cache",
         denoiser.blocks_after_prompt ? " inside the prompt" : "");
  if (!bundle.engine->takes_segments())
    fail(DLM_UNSUPPORTED,
         "this engine (%s) cannot use a prompt cache: open the bundle with engine \"onnxruntime\" "
         "on the CPU",
         bundle.engine->description().c_str());
  const int32_t rows = page_rows(denoiser.visible_block);
  return {bundle.manifest.graph_sha256, bundle.manifest.graph.cache_type, rows,
          static_cast<uint64_t>(rows) * row_bytes(denoiser.cache), denoiser.vocab_size};
}

}  // namespace

size_t save_prompt_cache(dlm_bundle& bundle, const int32_t* tokens, size_t count, const char* path,
                         const std::function<void()>& before_pass) {
  require(path, "path");
  const PromptCacheFormat format = format_of(bundle);
  const Denoiser& denoiser = bundle.manifest.denoiser;
  std::vector<int32_t> canvas = make_canvas(denoiser, tokens, count, 0);
  canvas.resize(canvas.size() / format.page_rows * format.page_rows);
  if (canvas.empty())
    fail(DLM_INVALID_ARGUMENT,
         "the prompt has %zu tokens, but a prompt cache contains whole pages of %d tokens: use a "
         "longer prompt",
         count, format.page_rows);
  save_prompt(denoiser, *bundle.engine, format, canvas, path, before_pass);
  return canvas.size();
}

}  // namespace dlm

dlm_status dlm_bundle_load_prompt_cache(dlm_bundle* bundle, const char* path, char* message,
                                        size_t message_capacity) {
  return dlm::guarded(message, message_capacity, [&] {
    dlm::require(bundle, "bundle");
    dlm::require(path, "path");
    bundle->prompt_caches.add(
        std::make_unique<const dlm::PromptCache>(path, dlm::format_of(*bundle)));
  });
}
