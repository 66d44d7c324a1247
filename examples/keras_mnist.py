"""Learn handwritten digits with Keras, in a script that says nothing of several workers.

python examples/keras_mnist.py                  one process
dadt run -np 2 examples/keras_mnist.py          the same by two workers
"""

import argparse
import gzip
import os
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np


def digits(folder: Path, name: str):
    """Images of 28x28 grey values from 0 to 1 and their labels, from a pair of IDX files (`train` or `t10k`)."""
    with gzip.open(folder / f"{name}-images-idx3-ubyte.gz") as f:
        pixels = np.frombuffer(f.read(), dtype=np.uint8, offset=16)
    with gzip.open(folder / f"{name}-labels-idx1-ubyte.gz") as f:
        labels = np.frombuffer(f.read(), dtype=np.uint8, offset=8)
    return pixels.reshape(-1, 28, 28, 1).astype("float32") / 255, labels.astype("int64")


def main():
    parser = argparse.ArgumentParser(description="Learn handwritten digits with Keras.")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data" / "mnist")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", default="mnist.keras", help="where the trained model goes")
    args = parser.parse_args()

    try:
        train, test = digits(args.data, "train"), digits(args.data, "t10k")
    except OSError as error:
        sys.exit(f"no digits in {args.data} ({error}): give the folder of the IDX files with --data")
    keras.utils.set_random_seed(args.seed)
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(8, 5, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(16, 5, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(args.lr),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    keep = keras.callbacks.ModelCheckpoint(args.save, monitor="val_accuracy", save_best_only=True)
    model.fit(*train, batch_size=args.batch_size, epochs=args.epochs, verbose=2, validation_data=test, callbacks=[keep])
    _, accuracy = model.evaluate(*test, verbose=0)
    print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
