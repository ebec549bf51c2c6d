"""What all settings share: strict frozen models, and numbers whose unit stands in the key's name."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0, le=30 * 86_400)]
SecondsOrZero = Annotated[float, Field(ge=0, le=30 * 86_400)]
Celsius = Annotated[float, Field(ge=0, le=130)]
SizeText = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}x[1-9][0-9]{0,5}$")]
"""Pixels, `WIDTHxHEIGHT`."""
Port = Annotated[int, Field(ge=1, le=65_535)]


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
