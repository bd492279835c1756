// Classifier-free guidance: combines a denoiser's predictions with the prompt and the denoiser's
// predictions without the prompt.
//
// The guided logits are l = l_u + (w + 1)(l_c - l_u), as in LLaDA's loop (arXiv:2502.09992). Here w
// is the guidance scale, and l_c are the logits with the prompt. l_u are the logits of a second
// canvas, in which mask tokens replace the prompt and all other tokens of the caller. One pass runs
// both canvases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decode/proposer.h"
#include "engines/engine.h"

namespace dlm {

// Computes guided logits. Also computes the candidates and entropies that an engine would return
// for these logits.
class Guided {
 public:
  // Computes the guided predictions of `rows` rows. `conditional` contains the predictions with the
  // prompt, and `unconditional` contains the logits [rows, V] without the prompt. If one of a row's
  // logits is NaN or +inf, or if all logits of the row are -inf, the probabilities of the row are
  // NaN.
  Predictions guide(const Denoiser& denoiser, double scale, const Predictions& conditional,
                    const float* unconditional, size_t rows);

 private:
  void rank(const Denoiser& denoiser, size_t row);

  std::vector<float> logits_, probs_, entropy_;
  std::vector<int32_t> tokens_;
};

}  // namespace dlm
