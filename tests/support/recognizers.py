"""Configurations of tiny recognizers of NeMo's, as their recipes have them, and tokenizers of Canary's form."""

from __future__ import annotations

from pathlib import Path

import yaml

from support.models import ASR

_HIDDEN = 32
_TRANSFORMER = f"{ASR}.transformer"


def save_canary_tokenizers(folder: Path) -> dict[str, Path]:
    """Train the tokenizer of special tokens, and one of English of ten pieces; return their folders by language."""
    from nemo.collections.common.tokenizers.canary_tokenizer import CanaryTokenizer
    from nemo.collections.common.tokenizers.sentencepiece_tokenizer import create_spt_model

    CanaryTokenizer.build_special_tokenizer(["en", "de", "transcribe", "translate"], folder / "spl")
    (folder / "text.txt").write_text("ab cd\nab\ncd ab cd\n")
    create_spt_model(
        str(folder / "text.txt"), vocab_size=10, sample_size=-1, do_lower_case=False, output_dir=str(folder / "en")
    )
    return {"spl_tokens": folder / "spl", "en": folder / "en"}


def save_multitask_config(folder: Path) -> Path:
    """Write the YAML of an EncDecMultiTaskModel, as Canary is one: a Conformer and a decoder of one layer each."""
    tokenizers = save_canary_tokenizers(folder)
    model = {
        "sample_rate": 16000,
        "prompt_format": "canary",
        "model_defaults": {"asr_enc_hidden": _HIDDEN, "lm_enc_hidden": _HIDDEN, "lm_dec_hidden": _HIDDEN},
        "train_ds": {"manifest_filepath": "???"},
        "tokenizer": {
            "dir": None, "type": "agg",
            "langs": {language: {"dir": str(path), "type": "bpe"} for language, path in tokenizers.items()},
            "custom_tokenizer": {
                "_target_": "nemo.collections.common.tokenizers.canary_tokenizer.CanaryTokenizer", "tokenizers": None
            },
        },
        "preprocessor": {"_target_": f"{ASR}.AudioToMelSpectrogramPreprocessor", "features": 16, "sample_rate": 16000},
        "encoder": {
            "_target_": f"{ASR}.ConformerEncoder", "feat_in": 16, "n_layers": 1, "d_model": _HIDDEN, "n_heads": 2,
            "feat_out": -1, "conv_kernel_size": 5, "subsampling": "dw_striding", "subsampling_factor": 8,
            "subsampling_conv_channels": 8, "ff_expansion_factor": 2,
        },
        "transf_encoder": {
            "_target_": f"{_TRANSFORMER}.transformer_encoders.TransformerEncoder", "num_layers": 0,
            "hidden_size": _HIDDEN, "inner_size": 64, "num_attention_heads": 2,
        },
        "transf_decoder": {
            "_target_": f"{_TRANSFORMER}.get_nemo_transformer", "model_name": None, "pretrained": False,
            "encoder": None, "pre_ln_final_layer_norm": True,
            "config_dict": {
                "max_sequence_length": 512, "num_token_types": 0, "embedding_dropout": 0.0,
                "learn_positional_encodings": False, "hidden_size": _HIDDEN, "inner_size": 64, "num_layers": 1,
                "num_attention_heads": 2, "ffn_dropout": 0.0, "attn_score_dropout": 0.0, "attn_layer_dropout": 0.0,
                "hidden_act": "relu", "pre_ln": True, "vocab_size": None,
            },
        },
        "head": {
            "_target_": "nemo.collections.asr.parts.submodules.token_classifier.TokenClassifier", "num_layers": 1,
            "activation": "relu", "log_softmax": True, "hidden_size": _HIDDEN, "num_classes": None, "dropout": 0.0,
            "use_transformer_init": True,
        },
        "decoding": {
            "strategy": "beam", "return_best_hypothesis": True,
            "beam": {"beam_size": 1, "len_pen": 0.0, "max_generation_delta": 50},
        },
        "loss": {
            "_target_": "nemo.collections.common.losses.smoothed_cross_entropy.SmoothedCrossEntropyLoss",
            "label_smoothing": 0.0, "pad_id": None,
        },
        "optim": {"name": "adamw", "lr": 3e-4, "sched": {"name": "InverseSquareRootAnnealing", "warmup_steps": 2500}},
    }  # fmt: skip
    path = folder / "multitask.yaml"
    path.write_text(yaml.safe_dump({"name": "tiny", "model": model}))
    return path
